"""Skips a step whose loss spikes, or goes back to the weights of some steps ago, and leaves the batches out.

What it does: it holds the loss of each optimizer step against the mean of the last ones. A spike, or a loss that is
not finite, is not learnt from: its step is skipped, or (``action="rollback"``) weights and optimizer state also go
back to a snapshot that is older than the trouble. The data does not go back, so the batches since the snapshot are
not seen again. Spikes are counted and logged, and too many in a row end the run.

When it helps: runs that diverge on rare bad batches. What it costs: a few operations on one number per batch and a
sum over the ranks per step; on CUDA the host waits for the forward pass of a step, after it has given the device the
backward pass. A rollback needs host memory or disk for two snapshots, and the time to take one every
``snapshot_every`` steps.

Sources: Lightning's ``SpikeDetection`` for the rule and its numbers (a window of 10, 2.0 times the mean above the mean,
and worse than the last loss); Chowdhery et al., PaLM, 2022, section 5.1, for going back about 100 steps and leaving
out the batches around the spike, which did not spike again from another state.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.measure.lightning_internals import is_accumulating, logs_this_step, loss_divisor
from lightning_speedkit.optimize.optimizer_options import checked_number
from lightning_speedkit.optimize.skipped_steps import SkippedSteps, drop_gradients, has_gradients, start_reading
from lightning_speedkit.optimize.skipped_steps_refusals import (
    checked_limit,
    refuse_guard,
    refuse_pruning,
    refuse_repeats,
)
from lightning_speedkit.optimize.snapshot import RunningStatistics
from lightning_speedkit.optimize.snapshot_history import SnapshotHistory

__all__ = ["SpikeGuard", "is_spike"]


def is_spike(loss: float, recent: Sequence[float], threshold: float = 2.0, margin: float = 0.0) -> bool:
    """Whether a loss is far above the mean of the recent ones, and above the last of them, or is not finite.

    Args:
        loss: The loss in question.
        recent: Those before it, the last one last; none of them spikes, and none if there were too few to judge by.
        threshold: How far above their mean, in units of the (absolute) mean.
        margin: How far above their mean at least, for losses near 0.

    >>> is_spike(2.9, [1.0, 0.9, 1.1]), is_spike(3.1, [1.0, 0.9, 1.1]), is_spike(math.nan, [])
    (False, True, True)
    """
    if not math.isfinite(loss):
        return True
    if not recent:
        return False
    mean = math.fsum(recent) / len(recent)
    return loss > recent[-1] and loss - mean >= max(threshold * abs(mean), margin)


class SpikeGuard(Callback):
    """Leaves out steps whose loss spikes, and goes back to a snapshot if asked to.

    ``spikes`` is how many there were so far; it is logged under the name ``loss_spikes``, from the first one on, at
    the Trainer's ``log_every_n_steps``. The loss of a step is the mean over its micro-batches and over the ranks, so
    all ranks do the same. A spike advances neither the learning rate schedule nor ``trainer.global_step``. A rollback
    brings back weights, buffers and optimizer state; schedule, counters and data go on from where they are. Weights
    averaged by another callback (EMA) are not brought back.

    Args:
        action: ``"skip"`` leaves the step out. ``"rollback"`` also goes back to the newest snapshot that is at least
            ``snapshot_every`` steps old, or else to the oldest.
        threshold: A spike is this many times the mean above the mean.
        window: How many losses the mean is of. Until there are so many, only a loss that is not finite is a spike.
        margin: A spike is at least this far above the mean; for losses that come near 0.
        max_in_a_row: More spikes than this without a good step in between are an error.
        snapshot_every: Optimizer steps between snapshots, for ``"rollback"`` only; 50 if not given.
        snapshot_folder: Where snapshots are kept, for ``"rollback"`` only; in host memory if not given. The files are
            removed when ``fit`` ends.

    Raises:
        ValueError: An argument is out of its range, or has no effect. During ``fit``: what was added to the module
            since the snapshot cannot be brought back.
        TypeError: An argument is no number.
        MisconfigurationException: At ``fit``: as :class:`NonFiniteGuard`; a rollback beside ``ModelPruning``.
        DivergenceError: During ``fit``: more spikes in a row than allowed.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Spiking(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean() * (1e6 if batch_idx == 20 else 1.0)
        >>> guard, short = SpikeGuard(), {"max_epochs": 1, "limit_train_batches": 30, "limit_val_batches": 0}
        >>> trainer = Trainer(callbacks=guard, accelerator="cpu", barebones=True, **short)
        >>> trainer.fit(Spiking())
        >>> guard.spikes >= 1
        True
    """

    def __init__(
        self,
        action: str = "skip",
        threshold: float = 2.0,
        window: int = 10,
        margin: float = 0.0,
        max_in_a_row: int = 10,
        snapshot_every: int | None = None,
        snapshot_folder: str | None = None,
    ) -> None:
        super().__init__()
        if action not in ("skip", "rollback"):
            raise ValueError(f"action={action!r} is unknown; use 'skip' or 'rollback'.")
        if action == "skip" and not (snapshot_every is None and snapshot_folder is None):
            raise ValueError("snapshot_every and snapshot_folder belong to action='rollback' and have no effect here.")
        self.action = action
        self.threshold = checked_number("threshold", threshold, 0.0)
        self.margin = checked_number("margin", margin, 0.0)
        self.window = checked_limit("window", window)
        self.max_in_a_row = checked_limit("max_in_a_row", max_in_a_row)
        self.snapshot_every = 50 if snapshot_every is None else checked_limit("snapshot_every", snapshot_every)
        self.snapshot_folder = snapshot_folder
        self.spikes = 0
        self._recent: deque[float] = deque(maxlen=self.window)
        self._in_a_row = 0
        self._history: SnapshotHistory | None = None
        self._sum: Tensor | None = None
        self._batches = 0
        self._read: Callable[[], float] | None = None
        self._statistics: RunningStatistics | None = None
        self._keeps = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_guard(self, trainer, pl_module)
            if self.action == "rollback":
                refuse_pruning(self, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_repeats(self, trainer)
        self._let_go(trainer)
        self._statistics = RunningStatistics(pl_module)
        if self.action == "rollback":
            self._history = SnapshotHistory(self.snapshot_every, self.snapshot_folder, trainer.global_rank)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keeps and self._statistics is not None:
            self._statistics.keep()
            self._keeps, self._sum, self._batches, self._read = False, None, 0, None
            if self._history is not None:
                self._history.take_if_due(pl_module, trainer.optimizers[0])

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        undivided = loss.detach().float() * loss_divisor(trainer)
        self._sum = undivided if self._sum is None else self._sum + undivided
        self._batches += 1
        if not is_accumulating(trainer):
            self._read = start_reading(self._mean_loss(trainer, self._sum))

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._keeps = True
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._sum is None or (self._read is None and scaler is not None):  # then Lightning takes no step
            return
        loss = (self._read or start_reading(self._mean_loss(trainer, self._sum)))()
        if is_spike(loss, self._recent if len(self._recent) == self.window else [], self.threshold, self.margin):
            self._act(trainer, pl_module, optimizer, loss)
            return
        self._recent.append(loss)
        self._in_a_row = 0
        if self._history is not None:
            self._history.count_step()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        SkippedSteps.of(trainer).settle(trainer)
        if self.spikes and logs_this_step(trainer):
            pl_module.log("loss_spikes", float(self.spikes))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._let_go(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._let_go(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"spikes": self.spikes, "in_a_row": self._in_a_row, "recent": list(self._recent)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.spikes, self._in_a_row = state_dict["spikes"], state_dict["in_a_row"]
        self._recent = deque(state_dict["recent"], maxlen=self.window)

    def _mean_loss(self, trainer: pl.Trainer, total: Tensor) -> Tensor:
        """Over the micro-batches of the window and over the ranks."""
        mean = total / self._batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            mean = mean / scaler.scale(torch.ones_like(mean))  # get_scale() would wait for the device
        if trainer.world_size > 1:
            torch.distributed.all_reduce(mean)
            mean = mean / trainer.world_size
        return mean

    def _act(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer, loss: float
    ) -> None:
        self.spikes += 1
        self._in_a_row += 1
        mean = math.fsum(self._recent) / len(self._recent) if self._recent else math.nan
        what = f"a loss of {loss:g}, with a mean of {mean:g} over the last {len(self._recent)} steps"
        if self._in_a_row > self.max_in_a_row:
            raise DivergenceError(
                f"{self._in_a_row} optimizer steps in a row had a loss that spikes, the last one {what}; allowed are "
                f"max_in_a_row={self.max_in_a_row}. If such a loss is right, raise threshold={self.threshold:g} or set "
                "a margin. If not, lower the learning rate, clip gradients, or look at the data."
            )
        _drop_gradients(trainer, optimizer)
        SkippedSteps.of(trainer).hold(trainer)
        if self._statistics is not None:
            self._statistics.restore()
        back = ""
        if self._history is not None and self._history.has_any:
            back = f", and the weights of {self._history.go_back(pl_module, optimizer)} steps ago are restored"
        if self.spikes == 1:
            rank_zero_warn(
                f"A spike in epoch {trainer.current_epoch}: {what}. Its step is skipped{back}. Further ones are "
                "counted in loss_spikes, which is logged, without a warning."
            )

    def _let_go(self, trainer: pl.Trainer) -> None:
        SkippedSteps.of(trainer).release()
        if self._history is not None:
            self._history.clear()
        self._history, self._keeps = None, True
        self._sum, self._batches, self._read, self._statistics = None, 0, None, None


def _drop_gradients(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and has_gradients(optimizer):
        # With a fused optimizer the scaler looks at the gradients inside its step only, and fails if there are none.
        with contextlib.suppress(RuntimeError):  # they are unscaled already: the optimizer is not fused
            scaler.unscale_(optimizer)
    drop_gradients(optimizer)
