"""What a quantization did, and whether it was kept."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["QuantizationReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What was quantized, what it gained and cost, and whether it was kept.

    ``kept`` and ``reason`` say what came of it. ``backend`` is the method of the last attempt, and ``attempts`` says
    what came of each. ``layers_quantized`` names the ``k`` of ``layers_total`` layers with a weight of two or more
    dimensions that are int8 now; ``skipped`` says of every other one why it is not. Bytes are those of the saved
    state. Seconds are medians of the network's forward alone, float and int8 called alternately on ``threads``
    threads, for one sample and for ``batch_size`` of them. ``metric`` is ``None`` where no validation metric could be
    measured. ``relative_error`` is the largest relative distance between outputs of the two models over the
    calibration batches. What could not be measured is ``None``.

    >>> report = QuantizationReport(kept=False, reason="nothing to quantize")
    >>> report.describe()
    'Not quantized: nothing to quantize'
    """

    kept: bool
    reason: str
    backend: str | None = None
    engine: str | None = None
    attempts: tuple[str, ...] = ()
    layers_quantized: tuple[str, ...] = ()
    layers_total: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)
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
    folder: str | None = None

    def describe(self) -> str:
        """A few words for a person."""
        if self.bytes_before is None or self.bytes_after is None:
            return f"Not quantized: {self.reason}"
        parts = [
            f"{'Quantized' if self.kept else 'Quantization not kept'} ({self.backend}): "
            f"{len(self.layers_quantized)} of {self.layers_total} layers in int8",
            f"{self.bytes_before / 1e6:.3g} -> {self.bytes_after / 1e6:.3g} MB",
        ]
        if self.seconds_before_batch and self.seconds_after_batch:
            parts.append(
                f"{self.seconds_before_batch * 1e3:.3g} -> {self.seconds_after_batch * 1e3:.3g} ms "
                f"for a batch of {self.batch_size}"
            )
        if self.metric is not None and self.metric_before is not None and self.metric_after is not None:
            parts.append(f"{self.metric} {self.metric_before:.4g} -> {self.metric_after:.4g}")
        return f"{', '.join(parts)}. {self.reason}"

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps({"schema": 1, **values}, indent=2, allow_nan=False)
