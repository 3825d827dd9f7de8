"""What StructuredPruning did in a fit so far: takes its steps, judges them, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.conversion import on_cpu
from lightning_speedkit.compress.float_copy import copy_module, float_copy
from lightning_speedkit.compress.quality import drop_text, metric_drop
from lightning_speedkit.compress.shrink_cut import apply_plan, given_gradients, wrap_again
from lightning_speedkit.compress.shrink_plan import ShrinkPlan, ShrinkSettings, plan_shrink
from lightning_speedkit.compress.shrink_refusals import refuse_module
from lightning_speedkit.compress.shrink_report import ShrinkReport, measured_sizes
from lightning_speedkit.compress.shrink_resize import original_sizes
from lightning_speedkit.compress.shrink_sizes import set_sizes
from lightning_speedkit.compress.shrink_snapshot import put_back, take_snapshot
from lightning_speedkit.compress.validation import network_calls
from lightning_speedkit.errors import QuantizationError, SpeedkitError, did_you_mean
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["ShrinkRun"]

_SAVED = (
    "epoch", "steps_done", "undone", "validated", "pending", "layers", "skipped", "metric", "mode", "metric_before",
    "metric_after", "metric_drop", "reason", "last", "gradients",
)  # fmt: skip


class ShrinkRun:
    """The state of one fit; everything but ``calls`` is plain data that checkpoints hold.

    >>> run = ShrinkRun()
    >>> run.load({**run.state(), "steps_done": 2})
    >>> run.steps_done, run.undone
    (2, False)
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.steps_done = 0
        self.undone = False
        self.validated = False
        self.pending: dict[str, Any] | None = None
        self.layers: dict[str, list[int]] = {}
        self.skipped: dict[str, str] = {}
        self.metric: str | None = None
        self.mode: str | None = None
        self.metric_before: float | None = None
        self.metric_after: float | None = None
        self.metric_drop: float | None = None
        self.reason = ""
        self.last: float | None = None  # what the last validation logged
        self.gradients: dict[str, Tensor] | None = None  # of the last optimizer step, where they decide
        self.calls: Sequence[Call] = ()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in _SAVED}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state` gave."""
        for name in _SAVED:
            setattr(self, name, state[name])

    def step(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        settings: ShrinkSettings,
        max_metric_drop: float | None,
    ) -> None:
        """Removes what ``settings`` ask for from ``module``, on every rank the same."""
        refuse_module(module)
        plan = self._plan_on_first_rank(trainer, module, batch, settings)
        self.skipped = dict(plan.skipped)
        if not plan.cuts:
            return
        if max_metric_drop is not None and self.metric is not None:
            before = self._value(trainer)
            if before is None:
                logged = sorted(map(str, trainer.callback_metrics))
                raise MisconfigurationException(
                    f"max_metric_drop compares with {self.metric!r} before the step, which no validation has logged so "
                    f"far; logged: {logged}.{did_you_mean(self.metric, logged)}"
                )
            self.pending = {"epoch": trainer.current_epoch, "metric": before, "layers": dict(self.layers)}
            self.pending["snapshot"] = take_snapshot(module, trainer.optimizers)
        apply_plan(module, plan, trainer.optimizers)
        self.gradients = None
        wrap_again(trainer)
        self.validated = False
        for name, (before_now, after) in plan.layers.items():
            self.layers[name] = [self.layers.get(name, [before_now])[0], after]
        self.skipped = {name: why for name, why in self.skipped.items() if name not in self.layers}

    def judge(self, trainer: pl.Trainer, module: pl.LightningModule, max_metric_drop: float | None) -> None:
        """Keeps the last step, or puts everything back that it changed."""
        pending, self.pending = self.pending, None
        after = self._value(trainer)
        if pending is None or max_metric_drop is None:
            return
        if not self.validated or after is None:
            rank_zero_warn("StructuredPruning kept its last step unjudged: no validation has run since.")
            return
        self.metric_before, self.metric_after = pending["metric"], after
        self.metric_drop = metric_drop(self.metric_before, after, self.mode or "max")
        verdict = f"{self.metric} went from {self.metric_before:.6g} to {after:.6g}: {drop_text(self.metric_drop)}, "
        self.undone = not self.metric_drop <= max_metric_drop
        if not self.undone:
            self.reason = f"{verdict}within max_metric_drop={max_metric_drop:g}."
            return
        self.reason = f"{verdict}over max_metric_drop={max_metric_drop:g}; the last step was taken back."
        self.layers = pending["layers"]
        put_back(module, trainer.optimizers, pending["snapshot"])
        wrap_again(trainer)
        rank_zero_info(f"StructuredPruning: {self.reason}")

    def note_validation(self, trainer: pl.Trainer) -> None:
        """Keeps the metric: a checkpoint holds it, and the Trainer's own is gone after a resume."""
        value = trainer.callback_metrics.get(self.metric or "")
        self.validated, self.last = True, None if value is None else float(value)

    def note_gradients(self, module: pl.LightningModule) -> None:
        """Keeps the gradients of this step: those in the parameters are gone after validation."""
        self.gradients = {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}

    def report(
        self, module: pl.LightningModule, settings: ShrinkSettings, max_metric_drop: float | None
    ) -> ShrinkReport:
        """What was done; sizes and seconds are measured on the CPU if a step was taken in this process."""
        measured: dict[str, Any] = {}
        if self.calls:
            after = float_copy(module)
            before = copy_module(after)
            set_sizes(before, original_sizes(module))
            with own_random_numbers():
                measured = measured_sizes(before, after, self.calls)
        reason = self.reason
        if not self.layers and not reason:
            shrunk = ["an earlier fit has removed as much"] if self.steps_done and original_sizes(module) else []
            whys = [*shrunk, *(f"{name}: {why}" for name, why in self.skipped.items())]
            reason = "; ".join(whys) or "no step was due"
        return ShrinkReport(
            reason=reason,
            ratio=settings.ratio,
            head_ratio=settings.head_ratio,
            steps_done=self.steps_done,
            undone=self.undone,
            layers=dict(self.layers),
            skipped=dict(self.skipped),
            metric=self.metric,
            metric_before=self.metric_before,
            metric_after=self.metric_after,
            metric_drop=self.metric_drop,
            max_metric_drop=max_metric_drop,
            **measured,
        )

    def _plan_on_first_rank(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, settings: ShrinkSettings
    ) -> ShrinkPlan:
        plan: ShrinkPlan | None = None
        failure: BaseException | None = None
        if trainer.is_global_zero:
            try:
                with own_random_numbers():
                    floating = float_copy(module)
                    self.calls = network_calls(copy_module(floating), [on_cpu(batch)])  # type: ignore[arg-type]
                    plan = plan_shrink(
                        floating,
                        self.calls,
                        settings,
                        original=original_sizes(module),
                        gradients=given_gradients(self.gradients, settings.criterion),
                    )
            except QuantizationError as error:  # which speaks of calling the network
                failure = SpeedkitError(
                    f"StructuredPruning cannot call the network by itself: {error} Give the module a forward or a "
                    "validation_step that runs it on a training batch, or use shrink_model() before the fit."
                )
                failure.__cause__ = error
            except BaseException as error:
                failure = error
        # the other ranks wait here, and learn what came of it
        plan, failed = trainer.strategy.broadcast((plan, failure is not None))
        if failure is not None:
            raise failure
        if failed or plan is None:
            raise SpeedkitError("StructuredPruning failed on the first rank; its log says why.")
        return plan

    def _value(self, trainer: pl.Trainer) -> float | None:
        """The metric as the first rank has it, so that all ranks decide alike."""
        told: float | None = trainer.strategy.broadcast(self.last)
        return told
