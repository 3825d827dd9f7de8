"""What :class:`NonFiniteGuard` does during one ``fit``: it looks at the gradients, and makes a bad step none.

What it does: see ``non_finite_guard.py``. When it helps: never alone. What it costs: one pass over the gradients per
optimizer step; hooks that a run does not need are not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_speedkit.measure.lightning_hooks import BATCH_HOOKS, batch_in_progress, call_hooks, pass_over_hooks
from lightning_speedkit.measure.lightning_internals import logs_this_step
from lightning_speedkit.optimize.non_finite_gradients import (
    can_skip_by_itself,
    gradients_of,
    is_read_freely,
    non_finite_flag,
)
from lightning_speedkit.optimize.non_finite_guard_count import SkipCount
from lightning_speedkit.optimize.non_finite_guard_late import LateFlag, let_kernel_skip, settle_before_saves
from lightning_speedkit.optimize.skipped_steps import SkippedSteps, drop_gradients, has_gradients, start_reading
from lightning_speedkit.optimize.snapshot import RunningStatistics

__all__ = ["GuardedRun"]


class GuardedRun:
    """Guards one ``fit`` of a Trainer and a module.

    Args:
        trainer: The Trainer, whose training starts.
        pl_module: The module.
        skips: Counts what is skipped.
        owed: How many steps the schedules are ahead, as a checkpoint says.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, skips: SkipCount, owed: int) -> None:
        self._trainer, self._module, self._skips = trainer, pl_module, skips
        self._steps = SkippedSteps.of(trainer)
        self._steps.forget()
        self._steps.owed = owed
        statistics = RunningStatistics(pl_module)
        statistics.keep()
        self._statistics = statistics if statistics.hand_over() else None  # if there are any
        self._keeps = True  # the next batch starts a window
        self._late: LateFlag | None = None  # of the last step
        self._save_as_before: Callable[[], None] | None = None  # while the Trainer's save_checkpoint is ours
        self._callback: Callback | None = None  # of which hooks are passed over
        self._plugin: Any = trainer.precision_plugin
        self._has_scaler = getattr(self._plugin, "scaler", None) is not None
        self._had_backward = False  # the batch in progress, under a scaler
        self._awaits_scaler = False  # nobody has said yet whether it called the optimizer's step
        self._scaler_skips: int | None = None  # before the step in progress, if the precision plugin counts them
        self._hooks: list[Any] = []
        if self._has_scaler and not hasattr(self._plugin, "skipped_steps"):
            self._hooks = [o.register_step_post_hook(self._after_scaled_step) for o in trainer.optimizers]

    @property
    def owed(self) -> int:
        """How many steps the schedules are ahead."""
        return self._steps.owed

    def leave_out_hooks(self, callback: Callback, of: type[Callback]) -> None:
        """Most runs need one hook, once per step; a step that is skipped makes the end of batches matter."""
        needed = {"on_before_optimizer_step"}
        if self._has_scaler:
            needed |= {"on_train_batch_start", "on_before_backward", "on_train_batch_end"}
        if self._statistics is not None:
            needed.add("on_train_batch_start")
        if self._skips.total or self.owed:
            needed.add("on_train_batch_end")
        pass_over_hooks(self._trainer, callback, of, *(name for name in BATCH_HOOKS if name not in needed))
        self._callback = callback

    def let_go(self) -> None:
        """Leave the Trainer, its optimizers and the callback as they were."""
        for hook in self._hooks:
            hook.remove()
        if self._callback is not None:
            call_hooks(self._callback, *BATCH_HOOKS)
        if self._save_as_before is not None:
            self._save_as_before()
        self._steps.forget()
        self._hooks, self._save_as_before, self._late = [], None, None

    def start_batch(self) -> None:
        """Keep what a forward pass changes, if the batch opens a window."""
        self._had_backward = False
        if self._keeps and self._statistics is not None:
            self._statistics.keep()
            self._keeps = False

    def see_backward(self) -> None:
        """Know that the batch in progress has a loss."""
        self._had_backward = True

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: let it be none if a gradient is not finite."""
        self._keeps = True
        if self._late is not None:
            self.read_late()
        gradients = gradients_of(optimizer)
        if not gradients:  # there was no loss, or another guard has skipped the step
            return
        if self._has_scaler:
            if self._would_spoil_momenta(optimizer, gradients):
                self._plugin.scaler.unscale_(optimizer)  # let it find them, and shrink its scale
                self._skip(optimizer, by_scaler=True)
            else:
                self._await_scaler()
            return
        flag = non_finite_flag(gradients)
        if not is_read_freely(flag) and can_skip_by_itself(optimizer):
            let_kernel_skip(optimizer, flag)
            self._read_later(flag)
        elif flag.item():
            self._skip(optimizer)
        else:
            self._skips.in_a_row = 0
        self._steps.pay(self._trainer)

    def end_batch(self, batch: Any, batch_idx: int) -> None:
        """Take a step that was none off the counters, and log how many there were."""
        if self._awaits_scaler:
            self._awaits_scaler = False
            if self._scaler_skips is None or self._plugin.skipped_steps > self._scaler_skips:
                self._steps.hold(self._trainer)
                self._restore_statistics()
                self._count((batch, batch_idx), by_scaler=True)
            else:
                self._skips.in_a_row = 0
        if self._steps.is_held and self._late is not None:  # another guard has skipped the step, and undoes what is
            self._late = self._late._replace(kept=None)
        self._steps.settle(self._trainer)
        if self._trainer.global_step == self._trainer.max_steps:  # is it the last one?
            self.read_late()
        if self._skips.total and logs_this_step(self._trainer):
            self._module.log("skipped_steps", float(self._skips.total))

    def read_late(self) -> None:
        """Learn whether a kernel has skipped the last step, and make up for it."""
        if self._late is None:
            return
        (read, batch, kept), self._late = self._late, None
        if read():
            if kept is not None:
                self._steps.owe(self._trainer)
            if kept and self._statistics is not None:
                self._statistics.restore(kept)
            self._count(batch, by_scaler=self._has_scaler)
        else:
            self._skips.in_a_row = 0
        if self._statistics is None or not self._steps.is_awaited:
            self._steps.know()
        else:  # the next forward pass may have changed them already
            with self._statistics.as_kept():
                self._steps.know()

    def _skip(self, optimizer: torch.optim.Optimizer, by_scaler: bool = False) -> None:
        self._restore_statistics()
        self._count(batch_in_progress(self._trainer), by_scaler)
        drop_gradients(optimizer)
        self._steps.hold(self._trainer)

    def _would_spoil_momenta(self, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> bool:
        """Whether a scaler would let a fused kernel skip the one step that it cannot skip by itself."""
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        return fused and not can_skip_by_itself(optimizer) and bool(non_finite_flag(gradients).item())

    def _read_later(self, flag: Tensor) -> None:
        kept = [] if self._statistics is None else self._statistics.hand_over()
        self._late = LateFlag(start_reading(flag), batch_in_progress(self._trainer), kept)
        self._steps.doubt()
        self._end_batches()
        if self._save_as_before is None:
            self._save_as_before = settle_before_saves(self._trainer, self.read_late)

    def _await_scaler(self) -> None:
        """Count the step once the scaler has called it, or its plugin has counted no skip."""
        if not self._had_backward:  # then Lightning takes no step, though it counts one
            self._steps.hold(self._trainer)
            return
        self._awaits_scaler = True
        self._scaler_skips = getattr(self._plugin, "skipped_steps", None)
        if self._scaler_skips is None:
            self._steps.hold(self._trainer)  # a step that is taken releases it

    def _after_scaled_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The scaler has called the step. A fused one may have skipped by itself."""
        self._awaits_scaler = False
        if not has_gradients(optimizer):  # another guard has skipped it
            return
        found = getattr(optimizer, "found_inf", None)
        if found is not None and is_read_freely(found) and found.item():
            self._restore_statistics()
            self._count(batch_in_progress(self._trainer), by_scaler=True)
            return
        self._steps.release()
        if found is not None and not is_read_freely(found):
            self._read_later(found)
        else:
            self._skips.in_a_row = 0
        self._steps.pay(self._trainer)

    def _restore_statistics(self) -> None:
        if self._statistics is not None:
            self._statistics.restore()

    def _count(self, batch: tuple[Any, int], by_scaler: bool = False) -> None:
        self._end_batches()
        self._skips.add(self._trainer, self._module, batch, by_scaler)

    def _end_batches(self) -> None:
        if self._callback is not None:
            call_hooks(self._callback, "on_train_batch_end")
