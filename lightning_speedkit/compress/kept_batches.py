"""Keeps some batches of a fit to calibrate with, spread over its first epoch, as a step of the module got them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_speedkit.compress.conversion import on_cpu

__all__ = ["KeptBatches", "planned_batches"]


class KeptBatches:
    """Copies on the CPU of every ``n``-th batch that is offered, up to a count.

    >>> kept = KeptBatches(2)
    >>> kept.begin(planned=10)
    >>> for number in range(10):
    ...     kept.offer(number)
    >>> kept.batches
    [0, 5]
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.batches: list[Any] = []
        self._stride, self._offered = 1, 0

    def begin(self, planned: float) -> None:
        """Keep none yet; ``planned`` batches are to come, which may be infinite."""
        self.batches, self._offered = [], 0
        self._stride = max(1, int(planned) // self.count) if planned < float("inf") else 1

    def offer(self, batch: Any) -> None:
        """Keep a copy of the batch if it is its turn: the first is kept, wherever in an epoch a resumed fit begins."""
        if len(self.batches) < self.count and self._offered % self._stride == 0:
            self.batches.append(on_cpu(batch))
        self._offered += 1

    def clear(self) -> None:
        """Let go of all batches."""
        self.batches = []


def planned_batches(trainer: pl.Trainer, calibration: str) -> float:
    """How many batches of the first epoch, or of the first validation, are to come."""
    if calibration == "val":
        return _longest(trainer.num_val_batches) if trainer.enable_validation else 0.0
    planned = float(trainer.num_training_batches)
    if trainer.max_steps > 0:
        planned = min(planned, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return planned


def _longest(counts: Sequence[int | float]) -> float:
    return max(map(float, counts), default=0.0)
