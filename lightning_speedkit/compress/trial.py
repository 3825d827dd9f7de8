"""Tries int8 copies of a trained LightningModule, measures each against the float one, and judges by the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_speedkit.compress.artefact import int8_state
from lightning_speedkit.compress.calls import Call, batch_size, first_sample
from lightning_speedkit.compress.conversion import checked_int8, details_of, methods_of
from lightning_speedkit.compress.float_copy import copy_module, fingerprint, float_copy
from lightning_speedkit.compress.int8 import Int8Model, weighted_layers
from lightning_speedkit.compress.quality import metric_direction, metric_drop, paired_seconds, serialized_bytes
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.validation import network_calls, validation_metrics
from lightning_speedkit.errors import QuantizationError

__all__ = ["Judge", "ValidationData", "try_int8"]

_LARGEST_ERROR = 0.1  # relative; what is allowed where there is no metric to judge by
_QUALITY = {"acc", "accuracy", "f1", "auroc", "auc", "iou", "dice", "map", "r2", "score", "precision", "recall"}
_QUALITY_ENDS = ("accuracy", "auroc", "precision", "recall", "score")  # MulticlassAccuracy, as torchmetrics names it


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationData:
    """What validation runs on: loaders as a Trainer takes them, and whose data hooks apply to their batches."""

    loaders: Any
    datamodule: LightningDataModule | None = None
    limit_batches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Which metric decides, in which direction, and how large a drop is allowed.

    ``monitored`` holds the metrics that other callbacks watch, with their mode; they count if ``monitor`` is not set.
    """

    monitor: str | None = None
    mode: str = "auto"
    max_metric_drop: float = 0.01
    monitored: Sequence[tuple[str, str]] = ()

    def choose(self, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """The metric to judge by and its mode, or ``None`` if none was logged.

        A quality such as an accuracy goes before a loss: a loss has no scale of its own to set a limit on.

        >>> Judge().choose({"val_loss": 0.4, "val_acc": 0.9})
        ('val_acc', 'max')
        """
        logged = [name for name, value in metrics.items() if math.isfinite(value)]
        if self.monitor is not None:
            if self.monitor not in logged:
                raise QuantizationError(
                    f"monitor={self.monitor!r} was not logged as a finite number in validation; logged: {logged}."
                )
            return self.monitor, self._mode(self.monitor)
        watched = [name for name, _ in self.monitored if name in logged]
        qualities = [name for name in logged if _is_quality(name)]
        losses = sorted((name for name in logged if metric_direction(name) == "min"), key=lambda n: n != "val_loss")
        best = [name for name in watched if self._mode(name) == "max"]
        return next(((name, self._mode(name)) for name in (*best, *qualities, *watched, *losses, *logged)), None)

    def _mode(self, name: str) -> str:
        return self.mode if self.mode != "auto" else dict(self.monitored).get(name) or metric_direction(name)


def try_int8(
    module: LightningModule,
    batches: Sequence[Any],
    validation: ValidationData | None,
    judge: Judge,
    *,
    backend: str,
    skip: Sequence[str],
) -> tuple[Int8Model | None, QuantizationReport]:
    """An int8 copy of ``module`` if one passed, and the report in any case. ``module`` is not changed.

    ``batches`` are training batches on the CPU, as the training step got them.
    """
    before = fingerprint(module)
    floating = cast("LightningModule", float_copy(module))
    report = QuantizationReport(
        kept=False,
        reason="",
        layers_total=len(weighted_layers(floating)),
        calibration_batches=len(batches),
        max_metric_drop=judge.max_metric_drop,
    )
    try:
        calls = network_calls(copy_module(floating), batches)
        report = _with_metric_before(report, floating, validation, judge)
    except QuantizationError as failure:
        return None, replace(report, reason=str(failure))
    made: Int8Model | None = None
    no_metric = report.reason
    for method in methods_of(floating, backend):
        try:
            candidate, error = checked_int8(floating, calls, method, skip)
        except QuantizationError as failure:
            report = replace(report, attempts=(*report.attempts, f"{method}: {failure}"))
            report = replace(report, reason=str(failure)) if made is None else report
            continue
        made = candidate
        report = _described(replace(report, reason=no_metric), made, error)
        report = _judged(report, made, error, validation, judge)
        report = replace(report, attempts=(*report.attempts, f"{report.backend}: {report.reason}"))
        if report.kept or not made.recipe["static"]:
            break
    if fingerprint(module) != before:
        raise QuantizationError("The float model changed while it was quantized; the result is not to be used.")
    if made is not None:
        report = _with_sizes_and_seconds(report, floating, made.module, calls)
    return (made if report.kept else None), report


def _with_metric_before(
    report: QuantizationReport, floating: LightningModule, validation: ValidationData | None, judge: Judge
) -> QuantizationReport:
    try:
        metrics, count = _metrics(floating, validation)
    except QuantizationError as failure:
        if judge.monitor is not None:
            raise
        return replace(report, reason=str(failure))
    chosen = judge.choose(metrics)
    if chosen is None:
        return replace(report, reason="No validation metric was logged.")
    name, mode = chosen
    return replace(report, metric=name, metric_mode=mode, metric_before=metrics[name], validation_batches=count)


def _metrics(module: nn.Module, validation: ValidationData | None) -> tuple[dict[str, float], int]:
    if validation is None:
        return {}, 0
    try:
        with isolate_rng():  # the float model and the int8 copy draw the same random numbers
            return validation_metrics(
                copy_module(cast("LightningModule", module)),
                validation.loaders,
                datamodule=validation.datamodule,
                limit_batches=validation.limit_batches,
            )
    except Exception as error:  # the code of the user, run alone on a CPU
        raise QuantizationError(f"Validation failed ({type(error).__name__}: {error}).") from error


def _described(report: QuantizationReport, made: Int8Model, error: float) -> QuantizationReport:
    details = details_of(made, error)
    return replace(
        report,
        backend=details.backend,
        engine=details.engine,
        layers_quantized=details.layers_quantized,
        layers_total=details.layers_total,
        skipped=dict(details.skipped),
        relative_error=error,
    )


def _judged(
    report: QuantizationReport, made: Int8Model, error: float, validation: ValidationData | None, judge: Judge
) -> QuantizationReport:
    if report.metric is None or report.metric_before is None or report.metric_mode is None:
        kept = error <= _LARGEST_ERROR
        word = "within" if kept else "over"
        reason = f"{report.reason} The outputs differ by {error:.2g} (relative), {word} {_LARGEST_ERROR}."
        return replace(report, kept=kept, reason=reason)
    try:
        metrics, _ = _metrics(made.module, validation)
    except QuantizationError as failure:
        return replace(report, kept=False, reason=f"In int8: {failure}", metric_after=None, metric_drop=None)
    after = metrics.get(report.metric, math.nan)
    drop = metric_drop(report.metric_before, after, report.metric_mode)
    kept = drop <= judge.max_metric_drop
    reason = (
        f"{report.metric} went from {report.metric_before:.6g} to {after:.6g}: a drop of {drop:.3g}, "
        f"{'within' if kept else 'over'} max_metric_drop={judge.max_metric_drop:g}."
    )
    return replace(report, kept=kept, reason=reason, metric_after=after, metric_drop=drop)


def _with_sizes_and_seconds(
    report: QuantizationReport, floating: nn.Module, int8: nn.Module, calls: Sequence[Call]
) -> QuantizationReport:
    report = replace(
        report,
        bytes_before=serialized_bytes(floating.state_dict()),
        bytes_after=serialized_bytes(int8_state(int8)),
        threads=torch.get_num_threads(),
        batch_size=batch_size(calls[0]),
    )
    one = [first_sample(calls[0])]
    batch = _paired(floating, int8, calls[:1])
    single = _paired(floating, int8, one)
    return replace(
        report,
        seconds_before_batch=batch[0],
        seconds_after_batch=batch[1],
        seconds_before_one=single[0],
        seconds_after_one=single[1],
    )


def _paired(floating: nn.Module, int8: nn.Module, calls: Sequence[Call]) -> tuple[float | None, float | None]:
    def run(module: nn.Module) -> None:
        for call in calls:
            module.get_submodule(call.name)(*call.args, **call.kwargs)

    try:
        with torch.no_grad():
            return paired_seconds(partial(run, floating), partial(run, int8))
    except Exception:  # a network that needs a full batch; the full batch itself was checked before
        return None, None


def _is_quality(name: str) -> bool:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    told = any(w in _QUALITY or w.rstrip("0123456789") in _QUALITY or w.endswith(_QUALITY_ENDS) for w in words)
    return told and metric_direction(name) == "max"  # a dice_loss is none
