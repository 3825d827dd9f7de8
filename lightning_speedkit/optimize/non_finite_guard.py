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
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.optimize.non_finite_gradients import has_non_finite_gradient
from lightning_speedkit.optimize.non_finite_guard_count import SkipCount
from lightning_speedkit.optimize.non_finite_guard_run import GuardedRun
from lightning_speedkit.optimize.optimizer_options import checked_flag
from lightning_speedkit.optimize.skipped_steps_refusals import checked_limit, refuse_guard, refuse_repeats

__all__ = ["NonFiniteGuard", "has_non_finite_gradient"]


class NonFiniteGuard(OneOfAKind):
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
        TypeError: A limit is no whole number, or ``explain`` no truth value.
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
        self.explain = checked_flag("explain", explain)
        self._skips = SkipCount(self.max_in_a_row, self.max_total, explain)
        self._owed = 0  # what a checkpoint says of the steps that schedules are ahead
        self._run: GuardedRun | None = None

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far."""
        return self._skips.total

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_guard(self, trainer, pl_module)
            self._owed = 0  # a checkpoint, restored after this, may say otherwise

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_repeats(self, trainer)
        owed = self._owed
        self._let_go()
        self._skips.has_warned = False
        self._run = GuardedRun(trainer, pl_module, self._skips, owed)
        self._run.leave_out_hooks(self, NonFiniteGuard)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.start_batch()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self._run is not None:
            self._run.see_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.look(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.end_batch(batch, batch_idx)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read_late()
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # a device that failed cannot be read; a DivergenceError is no news
            self._read_late()
        self._let_go()

    @override
    def state_dict(self) -> dict[str, Any]:
        owed = self._owed if self._run is None else self._run.owed
        return {"skipped_steps": self._skips.total, "in_a_row": self._skips.in_a_row, "owed": owed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._skips.total, self._skips.in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]
        self._owed = state_dict.get("owed", 0)

    def _read_late(self) -> None:
        if self._run is not None:
            self._run.read_late()

    def _let_go(self) -> None:
        if self._run is not None:
            self._owed = self._run.owed
            self._run.let_go()
            self._run = None
