"""The loss of an optimizer step, summed up while the step is under way and read before it is taken.

What it does: it is the plain mean over the micro-batches of the step and over the ranks, whatever Lightning has divided
or scaled the loss by. What it costs: a sum over the ranks per step; on CUDA the host waits for the forward pass of the
step, after it has given the device the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_speedkit.measure.lightning_internals import is_accumulating, loss_divisor
from lightning_speedkit.optimize.skipped_steps import start_reading

__all__ = ["StepLoss"]


class StepLoss:
    """Of one optimizer step; :meth:`add` is called before each backward pass, :meth:`read` before the step."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._batches = 0
        self._read: Callable[[], float] | None = None

    def add(self, trainer: pl.Trainer, loss: Tensor) -> None:
        """Count the loss of a micro-batch; with that of the last one, its mean is on its way to the host."""
        undivided = loss.detach().float() * loss_divisor(trainer)
        self._sum = undivided if self._sum is None else self._sum + undivided
        self._batches += 1
        if not is_accumulating(trainer):
            self._read = start_reading(self._mean(trainer, self._sum))

    def read(self, trainer: pl.Trainer) -> float | None:
        """The mean; ``None`` if there was no loss, and Lightning therefore takes no step."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._sum is None or (self._read is None and scaler is not None):
            return None
        return (self._read or start_reading(self._mean(trainer, self._sum)))()

    def _mean(self, trainer: pl.Trainer, total: Tensor) -> Tensor:
        mean = total / self._batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            mean = mean / scaler.scale(torch.ones_like(mean))  # get_scale() would wait for the device
        if trainer.world_size > 1:
            torch.distributed.all_reduce(mean)
            mean = mean / trainer.world_size
        return mean
