"""Skips an optimizer step whose gradient is not finite, so that one bad batch does not end a run.

What it does: a step with a NaN or an infinity anywhere in the gradient changes nothing: neither weights, nor momenta,
nor running statistics, nor the learning rate schedule, nor ``trainer.global_step``. Skips are counted and logged, the
first one says where the number came from, and too many of them end the run. Under fp16 the gradient scaler already
skips such steps; then the guard counts them, and holds the schedule and the counter, which Lightning advances
(Lightning #5558).

When it helps: rare bad samples, rare overflows. It is no cure for a learning rate that is too high: a run that skips
often is sick, therefore the cap. What it costs: one pass over the gradients per optimizer step. On CUDA the host does
not wait with a fused optimizer (``fused=True``), whose kernel skips by itself; it learns of the skip one step
later, or when a checkpoint is saved, and until then the guard holds on to the batch and its device memory.
Another optimizer has its step started by the host, which therefore waits once per optimizer step, as torch's
``GradScaler`` does.

Source: PyTorch ``GradScaler`` for what a skipped step is; asked for in Lightning #4956.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.measure.lightning_internals import logs_this_step
from lightning_speedkit.optimize.non_finite_gradients import (
    can_skip_by_itself,
    has_non_finite_gradient,
    is_read_freely,
)
from lightning_speedkit.optimize.non_finite_guard_origin import explain_non_finite
from lightning_speedkit.optimize.skipped_steps import (
    SkippedSteps,
    drop_gradients,
    has_gradients,
    start_reading,
)
from lightning_speedkit.optimize.skipped_steps_refusals import checked_limit, refuse_guard, refuse_repeats
from lightning_speedkit.optimize.snapshot import RunningStatistics

__all__ = ["NonFiniteGuard", "has_non_finite_gradient"]

_SCALE_SEARCH = 16  # skips in a row that bring a scale of 65536 down to 1


class NonFiniteGuard(Callback):
    """Skips optimizer steps whose gradient is not finite; counts them, says where the first came from, and caps them.

    ``skipped_steps`` is how many were skipped so far; it is logged under that name, from the first one on, at the
    Trainer's ``log_every_n_steps``. On ranks whose gradients are synchronised, all skip the same steps.

    Args:
        max_in_a_row: More skipped steps than this without a good one in between are an error. Under a gradient scaler
            16 more are allowed, which it may need to find its scale.
        max_total: More skipped steps than this are an error; ``None`` for no such limit.
        explain: Whether the first skip runs the forward pass once more, on a copy of the module, to name the module
            whose output was not finite first.

    Raises:
        ValueError: A limit is not 1 or more.
        TypeError: A limit is no whole number.
        MisconfigurationException: At ``fit``: manual optimization, an optimizer that evaluates its closure several
            times (LBFGS), DeepSpeed, or FSDP of the first version.
        DivergenceError: During ``fit``: more steps were skipped than allowed.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Bad(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).sum() * (float("nan") if batch_idx == 1 else 1.0)
        >>> guard, short = NonFiniteGuard(), {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0}
        >>> trainer = Trainer(callbacks=guard, accelerator="cpu", barebones=True, **short)
        >>> trainer.fit(Bad())
        >>> guard.skipped_steps, trainer.global_step
        (1, 3)
    """

    def __init__(self, max_in_a_row: int = 10, max_total: int | None = None, explain: bool = True) -> None:
        super().__init__()
        self.max_in_a_row = checked_limit("max_in_a_row", max_in_a_row)
        self.max_total = None if max_total is None else checked_limit("max_total", max_total)
        self.explain = explain
        self.skipped_steps = 0
        self._in_a_row = 0
        self._has_warned = False
        self._batch: tuple[Any, int] = (None, 0)  # the one in progress
        self._statistics: RunningStatistics | None = None
        self._keeps = True  # the next batch starts a window
        # Of the last step: its flag, its batch, and the running statistics before it; None if nothing is to be undone
        self._late: tuple[Callable[[], float], tuple[Any, int], list[torch.Tensor] | None] | None = None
        self._steps: SkippedSteps | None = None  # of the Trainer, during fit
        self._owed = 0  # what a checkpoint says of it
        self._save_as_before: Callable[[], None] | None = None  # while the Trainer's save_checkpoint is ours
        self._had_backward = False  # the batch in progress
        self._has_scaler = False
        self._awaits_scaler = False  # nobody has said yet whether it called the optimizer's step
        self._scaler_skips: int | None = None  # before the step in progress, if the precision plugin counts them
        self._hooks: list[Any] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_guard(self, trainer, pl_module)
            self._owed = 0  # a checkpoint, restored after this, may say otherwise

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_repeats(self, trainer)
        owed = self._owed
        self._let_go(trainer)
        self._steps = SkippedSteps.of(trainer)
        self._steps.owed = owed
        self._statistics, self._has_warned = RunningStatistics(pl_module), False
        self._has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self._has_scaler and not hasattr(trainer.precision_plugin, "skipped_steps"):

            def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                self._after_scaled_step(trainer, pl_module, optimizer)

            self._hooks = [optimizer.register_step_post_hook(stepped) for optimizer in trainer.optimizers]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch, self._had_backward = (batch, batch_idx), False
        if self._keeps and self._statistics is not None:
            self._statistics.keep()
            self._keeps = False

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._had_backward = True

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._keeps = True
        self._read_late(trainer, pl_module)
        if not has_gradients(optimizer):  # there was no loss, or another guard has skipped the step
            return
        steps = SkippedSteps.of(trainer)
        if self._has_scaler and not self._had_backward:  # then Lightning takes no step, though it counts one
            steps.hold(trainer)
            return
        if self._has_scaler:
            self._awaits_scaler = True
            self._scaler_skips = getattr(trainer.precision_plugin, "skipped_steps", None)
            if self._scaler_skips is None:
                steps.hold(trainer)  # a step that is taken releases it
            return
        flag = has_non_finite_gradient(optimizer)
        if not is_read_freely(flag) and can_skip_by_itself(optimizer):
            self._skip_on_device(trainer, pl_module, optimizer, flag)
        elif flag.item():
            self._restore_statistics()
            self._count(trainer, pl_module, self._batch)
            drop_gradients(optimizer)
            steps.hold(trainer)
        else:
            self._in_a_row = 0
        steps.pay(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = SkippedSteps.of(trainer)
        if self._awaits_scaler:
            self._awaits_scaler = False
            if self._scaler_skips is None or trainer.precision_plugin.skipped_steps > self._scaler_skips:  # type: ignore[attr-defined]
                steps.hold(trainer)
                self._restore_statistics()
                self._count(trainer, pl_module, self._batch, by_scaler=True)
            else:
                self._in_a_row = 0
        if steps.is_held and self._late is not None:  # another guard has skipped the step, and undoes what there is
            self._late = (*self._late[:2], None)
        steps.settle(trainer)
        if trainer.global_step == trainer.max_steps:  # is it the last one?
            self._read_late(trainer, pl_module)
        if self.skipped_steps and logs_this_step(trainer):
            pl_module.log("skipped_steps", float(self.skipped_steps))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late(trainer, pl_module)
        self._let_go(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # a device that failed cannot be read; a DivergenceError is no news
            self._read_late(trainer, pl_module)
        self._let_go(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        owed = self._owed if self._steps is None else self._steps.owed
        return {"skipped_steps": self.skipped_steps, "in_a_row": self._in_a_row, "owed": owed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps, self._in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]
        self._owed = state_dict.get("owed", 0)

    def _let_go(self, trainer: pl.Trainer) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._steps is not None:
            self._owed, self._steps = self._steps.owed, None
        SkippedSteps.of(trainer).forget()
        if self._save_as_before is not None:
            self._save_as_before()
            self._save_as_before = None
        self._hooks, self._batch, self._late, self._statistics = [], (None, 0), None, None
        self._keeps, self._awaits_scaler = True, False

    def _restore_statistics(self) -> None:
        if self._statistics is not None:
            self._statistics.restore()

    def _skip_on_device(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: torch.optim.Optimizer,
        flag: torch.Tensor,
    ) -> None:
        """Let the fused kernel of the step in progress skip if the flag is 1; the host learns of it a step later."""
        optimizer.found_inf, optimizer.grad_scale = flag, None  # type: ignore[attr-defined]

        def forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            handle.remove()

        handle = optimizer.register_step_post_hook(forget)
        self._read_later(trainer, pl_module, flag)

    def _after_scaled_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The scaler has called the step. A fused one may have skipped by itself."""
        self._awaits_scaler = False
        if not has_gradients(optimizer):  # another guard has skipped it
            return
        steps, found = SkippedSteps.of(trainer), getattr(optimizer, "found_inf", None)
        if found is not None and is_read_freely(found) and found.item():
            self._restore_statistics()
            self._count(trainer, pl_module, self._batch, by_scaler=True)
            return
        steps.release()
        if found is not None and not is_read_freely(found):
            self._read_later(trainer, pl_module, found)
        else:
            self._in_a_row = 0
        steps.pay(trainer)

    def _read_later(self, trainer: pl.Trainer, pl_module: pl.LightningModule, flag: torch.Tensor) -> None:
        kept = [] if self._statistics is None else self._statistics.hand_over()
        self._late = (start_reading(flag), self._batch, kept)
        if self._save_as_before is None:
            self._settle_before_saves(trainer, pl_module)

    def _settle_before_saves(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Whoever saves a checkpoint, at whatever moment, saves no traces of a step whose flag was not read yet."""
        save, found = trainer.save_checkpoint, vars(trainer).get("save_checkpoint")

        def settle_and_save(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
            self._read_late(trainer, pl_module)
            save(filepath, weights_only=weights_only, storage_options=storage_options)

        def undo() -> None:
            if vars(trainer).get("save_checkpoint") is settle_and_save:
                del trainer.save_checkpoint
                if found is not None:
                    trainer.save_checkpoint = found  # type: ignore[method-assign]

        trainer.save_checkpoint = settle_and_save  # type: ignore[method-assign]
        self._save_as_before = undo

    def _read_late(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._late is None:
            return
        (read, batch, kept), self._late = self._late, None
        if read():
            if kept is not None:
                SkippedSteps.of(trainer).owe(trainer)
            if kept and self._statistics is not None:
                self._statistics.restore(kept)
            self._count(trainer, pl_module, batch, by_scaler=self._has_scaler)
        else:
            self._in_a_row = 0

    def _count(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: tuple[Any, int], by_scaler: bool = False
    ) -> None:
        self.skipped_steps += 1
        self._in_a_row += 1
        allowed = self.max_in_a_row + (_SCALE_SEARCH if by_scaler else 0)
        too_many = self._in_a_row > allowed or (self.max_total is not None and self.skipped_steps > self.max_total)
        if not too_many and (self._has_warned or by_scaler):  # the scaler's skips are part of its work
            return
        self._has_warned = True
        origin = explain_non_finite(trainer, pl_module, *batch) if self.explain else None
        where = f" Where it came from: {origin}." if origin else ""
        if too_many:
            raise DivergenceError(
                f"{self.skipped_steps} optimizer steps had a gradient that is not finite, {self._in_a_row} of them in "
                f"a row; allowed are max_in_a_row={allowed} and max_total={self.max_total}.{where} Look at that first; "
                "then at the learning rate, GradientClipping, or bf16 in place of fp16."
            )
        tell = rank_zero_warn if origin is None else warnings.warn
        tell(
            f"The gradient of batch {batch[1]} in epoch {trainer.current_epoch} is not finite, and its step is skipped."
            f"{where} Further ones are counted in skipped_steps, which is logged, without a warning."
        )
