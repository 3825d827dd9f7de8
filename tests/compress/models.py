"""Small networks of the kinds that quantization meets, and handwritten digits to train them on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def digit_loader(start: int, stop: int, batch_size: int = 64, **arguments: Any) -> DataLoader[Any]:
    x, y = digits()
    return DataLoader(TensorDataset(x[start:stop], y[start:stop]), batch_size=batch_size, **arguments)


def digit_batches(count: int = 4) -> list[Tensor]:
    return list(digits()[0][: 32 * count].split(32))


def relative(reference: Tensor, other: Tensor) -> float:
    return float((other - reference).norm() / reference.norm())


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and a functional ReLU between them: what fusing has to get right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)) + x[:, :, ::2, ::2])
        return self.head(x.flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class RowReader(nn.Module):
    """Reads a digit row by row with a recurrent layer."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.squeeze(1))[0][:, -1])


class Branching(nn.Module):
    """Asks the values of its input, which torch.fx cannot trace; the block inside can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x - x.mean()
        return self.head(self.block(x).flatten(1))


class Digits(LightningModule):
    """Classifies with any network; logs ``val_loss`` and ``val_acc``."""

    def __init__(self, net: nn.Module, lr: float = 0.01) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log("test", batch)

    def _log(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        output = self(batch[0])
        self.log(f"{name}_loss", nn.functional.cross_entropy(output, batch[1]))
        self.log(f"{name}_acc", (output.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class DirectDigits(Digits):
    """Has its layers on the LightningModule itself and a functional forward, as most examples do."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.save_hyperparameters()
        self.conv = nn.Conv2d(1, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 9, 10)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        logits = self.fc(x.flatten(1)) * scale
        return logits if mask is None else logits.masked_fill(mask, -1e9)


def quiet_trainer(**arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    return Trainer(**{**quiet, **arguments})
