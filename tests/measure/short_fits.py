"""Fits of five batches, and a callback that keeps what is said of them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.measure.lightning_internals import is_accumulating, skips_backward


class Norm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """What the readers say in each hook of a batch."""

    def __init__(self) -> None:
        self.accumulating: dict[str, list[bool]] = {"start": [], "backward": [], "end": []}
        self.skips: list[bool] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["start"].append(is_accumulating(trainer))

    def on_before_backward(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["backward"].append(is_accumulating(trainer))

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["end"].append(is_accumulating(trainer))
        self.steps.append(trainer.global_step)
        self.skips.append(skips_backward(trainer))


def short_fit(*callbacks: Callback, module: LightningModule | None = None, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module or Norm(), DataLoader(torch.arange(10.0).reshape(5, 2, 1), batch_size=None))  # type: ignore[arg-type]
