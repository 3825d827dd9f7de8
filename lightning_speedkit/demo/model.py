"""The demo's model: a small convolutional classifier, written as anybody would write it without this package."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

__all__ = ["DigitNet"]


class DigitNet(LightningModule):
    """Tells the ten digits apart: four convolutions with batch norm and a linear layer, 242,122 parameters.

    It takes float images of shape ``(batch, 1, height, width)`` and returns ten scores per image. A batch of training
    is a tuple of images and int64 labels. The first convolution reads patches of 4 by 4 pixels.

    Args:
        learning_rate: The step size of AdamW.

    >>> DigitNet()(torch.zeros(2, 1, 64, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            _block(1, 32, kernel_size=4, stride=4),
            _block(32, 64, kernel_size=3, stride=2),
            _block(64, 128, kernel_size=3, stride=2),
            _block(128, 128, kernel_size=3, stride=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_quality("val", batch)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_quality("test", batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _log_quality(self, split: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        scores = self(images)
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        self.log(f"{split}_loss", cross_entropy(scores, labels), batch_size=len(labels))
        self.log(f"{split}_acc", accuracy, batch_size=len(labels))


def _block(channels_in: int, channels_out: int, *, kernel_size: int, stride: int) -> nn.Sequential:
    padding = (kernel_size - 1) // 2 if stride < kernel_size else 0
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
