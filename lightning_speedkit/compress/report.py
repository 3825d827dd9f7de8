"""What a quantization did, and whether it was kept."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CandidateReport", "QuantizationReport"]

_SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """What came of one engine, or of one engine with some layers left in float.

    ``outcome`` is ``"kept"``; ``"missing"`` (cannot work here), ``"failed"`` (cannot convert this network) or
    the name of a trap of the self-check; ``"slower"`` or ``"not smaller"`` than what it is compared with; ``"metric"``
    (lost too much); or ``"not needed"``, where a better one was kept before. ``reason`` says more. ``float_layers``
    were left in float to save the metric. Seconds are medians for one sample and for a batch, all candidates in turn.
    """

    backend: str
    scheme: str
    outcome: str
    reason: str = ""
    bytes: int | None = None
    seconds_one: float | None = None
    seconds_batch: float | None = None
    relative_error: float | None = None
    expected_error: float | None = None
    metric: float | None = None
    metric_drop: float | None = None
    float_layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What was quantized, what it gained and cost, and whether it was kept.

    ``kept`` and ``reason`` say what came of it. ``backend`` and ``scheme`` are those of what was kept, or of what came
    nearest; the scheme ``"float32"`` is the float network in a runtime in which no quantized one is faster.
    ``candidates`` has a line for each that was tried. ``layers_quantized`` names those of the ``layers_total`` layers
    with a weight of two or more dimensions that are quantized now (a module with layers inside that holds a raw
    parameter beside them is no layer, unless that is quantized); ``skipped`` says of every other one why it is not,
    and ``float_layers`` which of these were left in float to save the metric. ``sensitivity`` is the relative error of
    the outputs if one layer alone is rounded, where that was asked.

    Bytes are those of the float state and of the files that were written. Seconds are medians of the network's forward
    alone, float and quantized called in turn on ``threads`` threads, for one sample and for ``batch_size`` of them.
    ``metric`` is ``None`` where no validation metric could be measured. ``relative_error`` is the largest relative
    distance between outputs of the two models over the calibration batches. What could not be measured is ``None``.

    >>> report = QuantizationReport(kept=False, reason="nothing to quantize")
    >>> report.describe()
    'Not quantized: nothing to quantize'
    """

    kept: bool
    reason: str
    backend: str | None = None
    scheme: str | None = None
    device: str = "cpu"
    objective: str = "latency"
    candidates: tuple[CandidateReport, ...] = ()
    layers_quantized: tuple[str, ...] = ()
    layers_total: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)
    float_layers: tuple[str, ...] = ()
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    bytes_before: int | None = None
    bytes_after: int | None = None
    threads: int | None = None
    seconds_before_one: float | None = None
    seconds_after_one: float | None = None
    batch_size: int | None = None
    seconds_before_batch: float | None = None
    seconds_after_batch: float | None = None
    metric: str | None = None
    metric_mode: str | None = None
    metric_before: float | None = None
    metric_after: float | None = None
    metric_drop: float | None = None
    max_metric_drop: float | None = None
    validation_batches: int | None = None
    relative_error: float | None = None
    calibration_batches: int = 0
    weights: str = "last"
    folder: str | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """A few words for a person."""
        if self.bytes_before is None or self.bytes_after is None:
            return f"Not quantized: {self.reason}"
        parts = [f"{self._verdict()} ({self.backend}): {len(self.layers_quantized)} of {self.layers_total} layers"]
        parts.append(f"{self.bytes_before / 1e6:.3g} -> {self.bytes_after / 1e6:.3g} MB")
        if self.seconds_before_batch and self.seconds_after_batch:
            parts.append(
                f"{self.seconds_before_batch * 1e3:.3g} -> {self.seconds_after_batch * 1e3:.3g} ms "
                f"for a batch of {self.batch_size}"
            )
        if self.metric is not None and self.metric_before is not None and self.metric_after is not None:
            parts.append(f"{self.metric} {self.metric_before:.4g} -> {self.metric_after:.4g}")
        saved = f" Saved in {self.folder}: {', '.join(self.files)}." if self.kept and self.files else ""
        return f"{', '.join(parts)}. {self.reason}{saved}"

    def _verdict(self) -> str:
        if not self.kept:
            return "Quantization not kept"
        return "Kept in float32, in another runtime" if self.scheme == "float32" else f"Quantized to {self.scheme}"

    def metrics(self) -> dict[str, float]:
        """The numbers of the report that a logger can plot, each under ``quantize/``."""
        numbers: dict[str, float | None] = {
            "kept": float(self.kept),
            "layers": float(len(self.layers_quantized)),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "relative_error": self.relative_error,
            "metric_drop": self.metric_drop,
        }
        for when in ("before", "after"):
            numbers[f"seconds_one_{when}"] = getattr(self, f"seconds_{when}_one")
            numbers[f"seconds_batch_{when}"] = getattr(self, f"seconds_{when}_batch")
            if self.metric is not None:
                numbers[f"{self.metric}_{when}"] = getattr(self, f"metric_{when}")
        return {f"quantize/{k}": float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        values = {"schema": _SCHEMA, **_plain(dataclasses.asdict(self))}
        return json.dumps(values, indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
