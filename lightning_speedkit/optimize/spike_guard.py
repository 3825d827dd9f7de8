"""Skips a step whose loss spikes, or goes back to the weights of some steps ago, and leaves the batches out.

What it does: it holds the loss of each optimizer step against the last ones. A spike, or a loss that is not finite,
is not learnt from: its step is skipped, or (``action="rollback"``) weights and optimizer state also go back to a
snapshot that is older than the trouble; the batches since then are not seen again. Spikes are counted and logged, and
too many in a row end the run.

When it helps: runs that diverge on rare bad batches. What it costs: a few operations on one number per batch and a
sum over the ranks per step; on CUDA the host waits for the forward pass of a step, after it has given the device the
backward pass. A rollback needs host memory or disk for two snapshots, the time to take one every ``snapshot_every``
steps, and the steps that it takes back.

Sources: those of the rule are in ``spike_guard_rule``; Chowdhery et al., PaLM, 2022, section 5.1, for going back about
100 steps and leaving out the batches around the spike, which did not spike again from another state.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.errors import DivergenceError, did_you_mean
from lightning_speedkit.measure.lightning_internals import logs_this_step
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.optimize.optimizer_options import checked_number
from lightning_speedkit.optimize.skipped_steps import SkippedSteps, drop_gradients, has_gradients
from lightning_speedkit.optimize.skipped_steps_refusals import (
    checked_limit,
    refuse_guard,
    refuse_pruning,
    refuse_repeats,
)
from lightning_speedkit.optimize.snapshot import RunningStatistics
from lightning_speedkit.optimize.snapshot_history import SnapshotHistory, snapshot_interval
from lightning_speedkit.optimize.spike_guard_loss import StepLoss
from lightning_speedkit.optimize.spike_guard_rule import SPREAD_WINDOW, is_spike

__all__ = ["SpikeGuard", "is_spike"]


class SpikeGuard(OneOfAKind):
    """Leaves out steps whose loss spikes, and goes back to a snapshot if asked to.

    ``spikes`` is how many there were so far, and ``taken_back`` how many steps rollbacks have undone; they are logged
    as ``loss_spikes`` and ``steps_taken_back``, from the first one on, at the Trainer's ``log_every_n_steps``. The loss
    of a step is the mean over its micro-batches and over the ranks, so all ranks do the same. A spike advances neither
    the learning rate schedule nor ``trainer.global_step``. A rollback brings back weights, buffers, optimizer state and
    the losses to compare with; schedule, counters and data go on from where they are. Weights averaged by another
    callback (EMA) are not brought back.

    Args:
        action: ``"skip"`` leaves the step out. ``"rollback"`` also goes back to the newest snapshot that is at least
            ``snapshot_every`` steps old, or else to the oldest.
        threshold: A spike is this many times the mean of the last losses above that mean.
        window: How many losses the mean is of. Until there are so many, only a loss that is not finite is a spike.
        margin: A spike is at least this far above that mean.
        deviations: A spike is this many standard deviations of the last 128 losses above their mean; 0 for no such
            rule.
        max_in_a_row: More spikes than this without a good step in between are an error.
        snapshot_every: Optimizer steps between snapshots, for ``"rollback"`` only. If not given, a hundredth of the
            run, at least 3 and at most 50; 50 if nobody knows how long the run is.
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
        deviations: float = 6.0,
        max_in_a_row: int = 10,
        snapshot_every: int | None = None,
        snapshot_folder: str | None = None,
    ) -> None:
        super().__init__()
        if action not in ("skip", "rollback"):
            names = ("skip", "rollback")
            hint = did_you_mean(action, names) if isinstance(action, str) else f" For that write threshold={action!r}."
            raise ValueError(f"action={action!r} is unknown; use 'skip' or 'rollback'.{hint}")
        if action == "skip" and not (snapshot_every is None and snapshot_folder is None):
            raise ValueError("snapshot_every and snapshot_folder belong to action='rollback' and have no effect here.")
        self.action = action
        self.threshold = checked_number("threshold", threshold, 0.0)
        self.margin = checked_number("margin", margin, 0.0)
        self.deviations = checked_number("deviations", deviations, 0.0)
        self.window = checked_limit("window", window)
        self.max_in_a_row = checked_limit("max_in_a_row", max_in_a_row)
        self.snapshot_every = None if snapshot_every is None else checked_limit("snapshot_every", snapshot_every)
        self.snapshot_folder = snapshot_folder
        self.spikes = self.taken_back = self._in_a_row = 0
        self._recent: deque[float] = deque(maxlen=max(self.window, SPREAD_WINDOW))
        self._history: SnapshotHistory | None = None
        self._loss = StepLoss()
        self._statistics: RunningStatistics | None = None
        self._keeps = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
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
            every = self.snapshot_every or snapshot_interval(trainer.estimated_stepping_batches)
            self._history = SnapshotHistory(every, self.snapshot_folder, trainer.global_rank)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keeps and self._statistics is not None:
            self._statistics.keep()
            self._keeps, self._loss = False, StepLoss()
            if self._history is not None:
                self._history.take_if_due(pl_module, trainer.optimizers[0])

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._loss.add(trainer, loss)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._keeps = True
        loss = self._loss.read(trainer)
        if loss is None:
            return
        if is_spike(loss, self._recent, self.threshold, self.margin, self.window, self.deviations):
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
            if self.taken_back:
                pl_module.log("steps_taken_back", float(self.taken_back))

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
        counts = {"spikes": self.spikes, "taken_back": self.taken_back, "in_a_row": self._in_a_row}
        return {**counts, "recent": list(self._recent)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.spikes, self._in_a_row = state_dict["spikes"], state_dict["in_a_row"]
        self.taken_back = state_dict.get("taken_back", 0)
        self._recent = deque(state_dict["recent"], maxlen=self._recent.maxlen)

    def _act(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer, loss: float
    ) -> None:
        self.spikes += 1
        self._in_a_row += 1
        last = list(self._recent)[-self.window :]
        mean = math.fsum(last) / len(last) if last else math.nan
        what = f"a loss of {loss:g}, with a mean of {mean:g} over the last {len(last)} steps"
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
            age = self._history.go_back(pl_module, optimizer)
            self.taken_back += age
            for _ in range(min(age, len(self._recent))):  # the losses of steps that are undone
                self._recent.pop()
            back = f", and the weights of {age} step{'s' * (age != 1)} ago are restored"
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
        self._loss, self._statistics = StepLoss(), None


def _drop_gradients(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and has_gradients(optimizer):
        # With a fused optimizer the scaler looks at the gradients inside its step only, and fails if there are none.
        with contextlib.suppress(RuntimeError):  # they are unscaled already: the optimizer is not fused
            scaler.unscale_(optimizer)
    drop_gradients(optimizer)
