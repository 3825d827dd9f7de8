"""The small module and data that every technique is tried on."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, SAMPLES, BATCH = 16, 3, 24, 4


class Block(nn.Module):
    """A residual block with the two layers that are easiest to get wrong: BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(self.norm(x))))


class Classifier(LightningModule):
    """Two blocks and a head; keeps the loss of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(FEATURES, CLASSES)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        output = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(output, batch[1]), sync_dist=True)
        self.log("val_acc", (output.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tensors() -> tuple[Tensor, Tensor]:
    """Samples whose class can be learnt, the same ones each time; the global random state is not touched."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def loader() -> DataLoader[Any]:
    """A plain loader with a generator of its own: by default each epoch draws a number from the global state."""
    return DataLoader(TensorDataset(*tensors()), batch_size=BATCH, generator=torch.Generator())


def classifier() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def quiet_trainer(callbacks: list[Callback], **arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(callbacks=callbacks, **{**quiet, **arguments})
