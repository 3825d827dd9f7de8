"""Decides which of several converted copies is kept: by speed or size first, then by the metric, from the best down.

A copy that loses too much is converted again with the layers that hurt most in float, until it is inside the tolerance
or the trials are used up; then it is timed again, and must still be a gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.candidates import Candidate, time_all
from lightning_speedkit.compress.engine import FLOAT32
from lightning_speedkit.compress.judge import Judge, ValidationData, measured_metrics
from lightning_speedkit.compress.quality import drop_text, metric_drop
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.sensitivity import layer_errors
from lightning_speedkit.errors import QuantizationError

__all__ = ["Selection", "fewest"]

_LARGEST_ERROR = 0.1  # relative; what is allowed where there is no metric to judge by
_TRIALS = 6  # conversions and validations, at most, to find the layers that have to stay in float
_CALLS = 4  # that the layers are ranked by
_LEAST_GAIN = 0.03  # of the time: two measurements of one network differ by about one percent


@dataclass(slots=True)
class Selection:
    """The candidates, what they are compared with, and what is known so far.

    ``report`` holds what was measured of the float network; the metric in it decides, or the outputs where it has none
    (``no_metric`` says why). ``judged`` is the last candidate that was, ``sensitivity`` the error of each layer.
    """

    floating: nn.Module
    baseline: nn.Module
    calls: Sequence[Call]
    candidates: Sequence[Candidate]
    report: QuantizationReport
    validation: ValidationData | None
    judge: Judge
    skip: Sequence[str] = ()
    accuracy_aware: bool = True
    no_metric: str = ""
    judged: Candidate | None = None
    sensitivity: dict[str, float] = field(default_factory=dict)

    def choose(self) -> Candidate | None:
        """The candidate to keep; the reports of all say why or why not."""
        self._time(self.candidates)
        quantized = [c for c in self.candidates if c.engine.scheme != FLOAT32]
        floats = [c for c in self.candidates if c.engine.scheme == FLOAT32 and c.usable]
        groups = [[c for c in quantized if c.usable]]
        groups.append([c for c in quantized if c.check is not None and c.check.trap == "saturation"])
        if self.report.objective == "latency" or not quantized:
            groups.append(floats)
        kept: Candidate | None = None
        for group in groups:
            for candidate in sorted(group, key=self._rank):
                if kept is not None:
                    candidate.ends("not needed", f"{kept.engine.name} is better and was kept")
                elif self._passes(candidate):
                    kept = candidate
        for candidate in floats:
            if not candidate.report.outcome:
                candidate.ends("not needed", "it is measured beside, and objective='size' asks for quantized weights")
        return kept

    def _rank(self, candidate: Candidate) -> tuple[float, float]:
        seconds = candidate.report.seconds_batch or math.inf
        return (candidate.report.bytes or math.inf, seconds) if self.report.objective == "size" else (seconds, 0.0)

    def _time(self, candidates: Sequence[Candidate]) -> None:
        batch, one = time_all(self.baseline, candidates, self.calls, self.report.device)
        self.report = replace(self.report, seconds_before_batch=batch, seconds_before_one=one)

    def _passes(self, candidate: Candidate) -> bool:
        if candidate.usable and (self._is_no_gain(candidate) or self._holds(candidate)):
            return candidate.report.outcome == "kept"
        can_spare = candidate.engine.scheme != FLOAT32 and candidate.report.outcome in ("metric", "saturation")
        if not (can_spare and self.accuracy_aware and self._spare_layers(candidate)):
            return False
        floats = [c for c in self.candidates if c.engine.scheme == FLOAT32 and c.usable]
        self._time([candidate, *floats])
        return not self._is_no_gain(candidate)

    def _is_no_gain(self, candidate: Candidate) -> bool:
        """Whether it is not faster, or not smaller, than what it is compared with; its report then says so."""
        own = candidate.report
        if self.report.objective == "size" and own.scheme != FLOAT32:
            before = self.report.bytes_before or 0
            if own.bytes is not None and own.bytes < before:
                return False
            candidate.ends("not smaller", f"its files take {own.bytes} bytes, the float state {before}")
            return True
        rivals = [("float32", self.report.seconds_before_batch)]
        if own.scheme != FLOAT32:
            rivals += [(c.engine.name, c.report.seconds_batch) for c in self.candidates if c.engine.scheme == FLOAT32]
        timed = [(seconds, name) for name, seconds in rivals if seconds is not None]
        if not timed:
            candidate.ends("slower", "the float network could not be timed, so no gain is known")
            return True
        best, name = min(timed)
        if own.seconds_batch is not None and own.seconds_batch < best * (1 - _LEAST_GAIN):
            return False
        now = "it could not be timed" if own.seconds_batch is None else f"{own.seconds_batch * 1e3:.3g} ms for a batch"
        near = own.seconds_batch is not None and own.seconds_batch < best
        than = f", and a gain below {_LEAST_GAIN:.0%} may be noise" if near else ""
        candidate.ends("slower", f"{now}; {name} takes {best * 1e3:.3g} ms{than}")
        return True

    def _holds(self, candidate: Candidate) -> bool:
        """Judge by the metric, or by the outputs where there is none."""
        self.judged, report = candidate, self.report
        assert candidate.converted is not None
        if report.metric is None or report.metric_before is None or report.metric_mode is None:
            error = candidate.report.relative_error or 0.0
            kept = error <= _LARGEST_ERROR
            where = f"{'within' if kept else 'over'} {_LARGEST_ERROR}"
            said = f"{self.no_metric} The outputs differ by {error:.2g} (relative), {where}."
            candidate.ends("kept" if kept else "metric", said)
            return kept
        try:
            metrics, _ = measured_metrics(candidate.converted.module, self.validation, report.device)
        except QuantizationError as failure:
            candidate.ends("failed", f"Quantized: {failure}")
            return False
        after, limit = metrics.get(report.metric, math.nan), self.judge.max_metric_drop
        drop = metric_drop(report.metric_before, after, report.metric_mode)
        kept = drop <= limit
        candidate.report = replace(candidate.report, metric=after, metric_drop=drop)
        where = "within" if kept else f"{drop - limit:.3g} over"
        candidate.ends(
            "kept" if kept else "metric",
            f"{report.metric} went from {report.metric_before:.6g} to {after:.6g}: {drop_text(drop)}, "
            f"{where} max_metric_drop={limit:g}.",
        )
        return kept

    def _spare_layers(self, candidate: Candidate) -> bool:
        """Convert again with the layers that hurt most in float; whether that holds, and then ``candidate`` is that."""
        assert candidate.converted is not None
        layers, scheme = candidate.converted.quantized, candidate.engine.scheme
        errors = layer_errors(self.floating, self.calls[:_CALLS], layers, scheme=scheme)
        self.sensitivity, hurting = errors, list(errors)
        tried: dict[int, Candidate] = {}

        def holds(count: int) -> bool:
            twin = Candidate(candidate.engine, candidate.report, candidate.prepared)
            twin.convert(self.floating, self.calls, [*self.skip, *hurting[:count]], self.report.device)
            twin.report = replace(twin.report, float_layers=tuple(hurting[:count]))
            tried[count] = twin
            return twin.usable and self._holds(twin)

        count = fewest(len(hurting) - 1, holds, trials=_TRIALS)
        if count is None:
            most = max(tried, default=0)
            if most:
                ended = tried[most].report.reason
                candidate.ends(
                    candidate.report.outcome, f"{candidate.report.reason} With {most} layers in float: {ended}"
                )
            self.judged = candidate
            return False
        best = tried[count]
        candidate.converted, candidate.check, candidate.report = best.converted, best.check, best.report
        said = f"{best.report.reason} In float to save it: {', '.join(best.report.float_layers)}."
        candidate.ends("kept", said)
        self.judged = candidate
        return True


def fewest(most: int, holds: Callable[[int], bool], *, trials: int) -> int | None:
    """The smallest count from 1 to ``most`` that was found to hold, with at most that many ``trials``.

    It grows the count until one holds, and then halves the gap to the largest that did not.

    >>> fewest(100, lambda count: count >= 11, trials=20)
    11
    >>> fewest(4, lambda count: False, trials=20) is None
    True
    """
    fails, found, count = 0, None, 1
    growth = 2 if most <= 16 else 3
    for _ in range(trials if most > 0 else 0):
        if holds(count):
            found = count
        else:
            fails = count
        if found is None:
            if count == most:
                break
            count = min(most, count * growth)
        elif found - fails <= 1:
            break
        else:
            count = (fails + found) // 2
    return found
