"""Measures what quantization gained and what it cost: bytes, seconds, and how far the outputs moved."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

import torch
from torch import Tensor

__all__ = ["alternating_seconds", "drop_text", "metric_direction", "metric_drop", "relative_error", "serialized_bytes"]

_LOWER_IS_BETTER = (
    "loss", "error", "err", "mse", "mae", "rmse", "mape", "nll", "perplexity", "ppl", "wer", "cer", "fid", "bpc", "bpb",
    "divergence", "distance", "ece", "eer",
)  # fmt: skip


def relative_error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest ``|other - reference| / |reference|`` (Euclidean norms) over pairs of tensors; inf if not comparable.

    Where both are the same infinity, as logits that a mask shut out are, nothing is counted.

    >>> relative_error([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])])
    0.1
    """
    if len(reference) != len(other) or any(a.shape != b.shape for a, b in zip(reference, other, strict=True)):
        return float("inf")
    worst = 0.0
    for expected, got in zip(reference, other, strict=True):
        shut = expected.isinf() & (expected == got)
        size = expected.double().masked_fill(shut, 0).norm()
        difference = (got.double() - expected.double()).masked_fill(shut, 0).norm()
        if not bool(torch.isfinite(difference)):
            return float("inf")
        if bool(difference > 0):
            worst = max(worst, float(difference / size) if bool(size > 0) else float("inf"))
    return worst


def serialized_bytes(state: Mapping[str, Any]) -> int:
    """How long the file is that ``torch.save`` writes of ``state``.

    >>> serialized_bytes({"weight": torch.zeros(1000)}) > 4000
    True
    """
    counter = _ByteCounter()
    torch.save(dict(state), cast("IO[bytes]", counter))
    return counter.length


class _ByteCounter(io.RawIOBase):
    """A file that keeps nothing but its length."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.length += size
        return size


def alternating_seconds(
    functions: Sequence[Callable[[], object]], *, budget_seconds: float = 2.0, at_most: int = 50
) -> list[float]:
    """The median seconds of one call of each function, called in turn on the threads that torch has now.

    After one unmeasured call of each there are at least five rounds, then more until the budget or the count is spent.
    Every second round goes backwards, so that a machine that grows slower treats all alike.
    """
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    end, rounds = time.perf_counter() + budget_seconds, 0
    while rounds < 5 or (rounds < at_most and time.perf_counter() < end):
        for index in order if rounds % 2 == 0 else order[::-1]:
            start = time.perf_counter()
            functions[index]()
            seconds[index].append(time.perf_counter() - start)
        rounds += 1
    return [statistics.median(times) for times in seconds]


def metric_direction(name: str) -> str:
    """``"min"`` if a metric of that name is better when lower, else ``"max"``.

    >>> metric_direction("val_loss"), metric_direction("val/acc"), metric_direction("test_RMSE")
    ('min', 'max', 'min')
    """
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "min" if any(w in _LOWER_IS_BETTER or w.endswith(("loss", "error")) for w in words) else "max"


def metric_drop(before: float, after: float, mode: str) -> float:
    """How much worse ``after`` is, on a scale on which 0.01 is a small loss of quality for every metric.

    Where higher is better: the difference itself for values up to one, and its share of ``before`` above that, so
    one point of accuracy is 0.01 whether accuracy runs to 1 or to 100. Where lower is better: its share of
    ``before``. Negative means better, NaN or infinity in ``after`` is an infinite drop.

    >>> round(metric_drop(0.90, 0.875, "max"), 9), metric_drop(2.0, 2.5, "min"), metric_drop(0.9, float("nan"), "max")
    (0.025, 0.25, inf)
    """
    if not abs(after) < float("inf"):
        return float("inf")
    if mode == "max":
        return (before - after) / max(1.0, abs(before))
    if before == after:
        return 0.0
    return (after - before) / abs(before) if before else float("inf") * (1 if after > before else -1)


def drop_text(drop: float) -> str:
    """What :func:`metric_drop` gave, in words: a metric that became better has gained.

    >>> drop_text(0.025), drop_text(-0.00252), drop_text(0.0), drop_text(float("inf"))
    ('a drop of 0.025', 'a gain of 0.00252', 'no drop', 'a drop of inf')
    """
    if drop == 0:
        return "no drop"
    return f"a gain of {-drop:.3g}" if drop < 0 else f"a drop of {drop:.3g}"
