"""The search for the largest batch size that fits: doubling, then bisection, and only what was tried is returned.

What it does: sizes are doubled from ``start`` until one does not fit or ``limit`` is reached; then the gap between the
largest that fits and the smallest that does not is halved until it is 1. These are at most ``2 log2(n) + 2`` trials for
a largest size of ``n``. For throughput it only doubles, and ends when two sizes in a row bring less than 5 % more.

When it helps: before a long run, on a device whose memory the model shall fill. What it costs: the trials.
Source: own; Lightning's finder can return a size that it has not tried (2.6.6: ``max_val=100`` gives 128).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_speedkit.measure.out_of_memory import is_out_of_memory, release_memory

__all__ = [
    "BatchSizeTrial",
    "FoundBatchSize",
    "check_search",
    "find_batch_size",
    "peak_bytes",
    "samples_for",
    "search_sizes",
    "start_peak",
    "trial_table",
    "wait_for",
]

TARGETS = ("memory", "throughput")
_NEAR = 0.95  # of the best rate


@dataclass(frozen=True, slots=True)
class BatchSizeTrial:
    """What was seen of one batch size.

    Attributes:
        size: Samples per batch, on each rank.
        samples: Samples that were really in a batch: ``size`` and the margin.
        fits: Whether everything ran.
        failed_in: ``"training"`` or ``"validation"`` if memory ran out there, ``"loading"`` if a dataset without length
            had no whole batch of that size, else empty.
        seconds: Of the fastest training step after the first one, without loading; ``None`` if it does not fit.
        peak_bytes: The most that the device's allocator gave out; ``None`` where there is none that counts, as on CPUs.
    """

    size: int
    samples: int
    fits: bool
    failed_in: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def samples_per_second(self) -> float:
        """On each rank; 0 if the size does not fit."""
        return self.samples / max(self.seconds, 1e-9) if self.fits and self.seconds is not None else 0.0


@dataclass(frozen=True, slots=True)
class FoundBatchSize:
    """A batch size, and the trials, in their order, that it comes from."""

    batch_size: int
    trials: tuple[BatchSizeTrial, ...]


def find_batch_size(
    step: Callable[[int], object],
    limit: int,
    start: int = 2,
    target: str = "memory",
    margin: float = 0.0,
    steps: int = 3,
    device: torch.device | str = "cpu",
) -> FoundBatchSize:
    """The largest batch size with which ``step`` does not run out of memory; for loops without a Trainer.

    Nothing is put back: give it a model and an optimizer that may be changed.

    Args:
        step: Called with a number of samples; makes one training step with a batch of that size.
        limit: No larger size.
        start: The first size that is tried.
        target: ``"memory"`` for the largest size, ``"throughput"`` for the smallest within 5 % of the most samples per
            second, among those tried.
        margin: Batches of a trial are larger by this part, 0.1 for a tenth, so that there is room left.
        steps: Steps of a trial, at least 2: from the second one on the optimizer has its state.
        device: Of the model; its unused memory is released before each trial.

    Raises:
        ValueError: An argument is outside its range.
        torch.OutOfMemoryError: Not even one sample fits.

    Example:

        >>> def step(samples):
        ...     if samples > 37:
        ...         raise torch.OutOfMemoryError("no room")
        >>> found = find_batch_size(step, limit=1000)
        >>> found.batch_size, [trial.size for trial in found.trials]
        (37, [2, 4, 8, 16, 32, 64, 48, 40, 36, 38, 37])
    """
    check_search(start, limit, target, margin, steps)
    device = torch.device(device)

    def attempt(size: int) -> BatchSizeTrial:
        release_memory(device)
        start_peak(device)
        samples, seconds, fits = samples_for(size, margin), list[float](), True
        try:
            for _ in range(steps):
                begin = time.perf_counter()
                step(samples)
                wait_for(device)
                seconds.append(time.perf_counter() - begin)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        return BatchSizeTrial(
            size, samples, fits, "" if fits else "training", min(seconds[1:]) if fits else None, peak_bytes(device)
        )

    return search_sizes(attempt, start, limit, target)


def search_sizes(
    attempt: Callable[[int], BatchSizeTrial],
    start: int,
    limit: int,
    target: str,
    told: Callable[[BatchSizeTrial], None] = lambda _: None,
) -> FoundBatchSize:
    """Try sizes as the module's text says; ``told`` hears of each trial.

    Raises:
        torch.OutOfMemoryError: Not even one sample fits.
        ValueError: There is not even one sample.
    """
    trials: list[BatchSizeTrial] = []

    def fits(size: int) -> bool:
        trials.append(attempt(size))
        told(trials[-1])
        return trials[-1].fits

    largest, too_large, size = 0, limit + 1, min(start, limit)
    while largest < limit and not (target == "throughput" and _gains_no_more(trials)):
        if not fits(size):
            too_large = size
            break
        largest, size = size, min(2 * size, limit)
    while too_large <= limit and too_large - largest > 1 and (target == "memory" or largest == 0):
        size = (largest + too_large) // 2
        if fits(size):
            largest = size
        else:
            too_large = size
    if largest == 0 and trials[-1].failed_in == "loading":
        raise ValueError("There are no training batches, so batch sizes cannot be tried.")
    if largest == 0:
        raise torch.OutOfMemoryError(
            f"Not even a batch of {trials[-1].samples} fits: memory ran out in {trials[-1].failed_in}. Free memory on "
            "the device, or save some: lower precision, activation checkpointing, a smaller model."
        )
    if target == "throughput":
        best = max(trial.samples_per_second for trial in trials)
        largest = min(t.size for t in trials if t.fits and t.samples_per_second >= _NEAR * best)
    return FoundBatchSize(largest, tuple(trials))


def _gains_no_more(trials: Sequence[BatchSizeTrial]) -> bool:
    rates = [trial.samples_per_second for trial in trials]
    return len(rates) > 2 and _NEAR * max(rates[-2:]) <= max(rates[:-2])


def check_search(start: int, limit: int | None, target: str, margin: float, steps: int) -> None:
    """Raise for arguments outside their range, with what is allowed."""
    for name, value, least in (("start", start, 1), ("limit", limit, 1), ("steps", steps, 2)):
        if value is None and name == "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number; got {type(value).__name__}.")
        if value < least:
            raise ValueError(f"{name}={value} must be {least} or more.")
    if limit is not None and start > limit:
        raise ValueError(f"start={start} is above limit={limit}; the first size tried is start.")
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is unknown; use 'memory' or 'throughput'.")
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise TypeError(f"margin={margin!r} must be a number; got {type(margin).__name__}.")
    if not 0 <= margin <= 1:
        raise ValueError(f"margin={margin!r} must be from 0 to 1; 0.1 leaves room for a tenth more samples.")


def samples_for(size: int, margin: float) -> int:
    """The samples in a batch of a trial.

    >>> samples_for(10, 0.1), samples_for(1, 0.1), samples_for(7, 0.0)
    (11, 2, 7)
    """
    return math.ceil(round(size * (1 + margin), 6))


def trial_table(trials: Sequence[BatchSizeTrial]) -> str:
    """The trials as text, a line each.

    >>> print(trial_table([BatchSizeTrial(8, 8, True, "", 0.5, 2**20), BatchSizeTrial(16, 16, False, "validation")]))
    batch size  fits                 seconds/step  samples/s  peak MiB
             8  yes                      0.500000         16       1.0
            16  not in validation               -          -         -
    """
    lines = ["batch size  fits                 seconds/step  samples/s  peak MiB"]
    for trial in trials:
        failed = "no whole batch" if trial.failed_in == "loading" else f"not in {trial.failed_in}"
        fits = "yes" if trial.fits else failed
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.6f}"
        rate = f"{trial.samples_per_second:,.0f}" if trial.fits else "-"
        peak = "-" if trial.peak_bytes is None else f"{trial.peak_bytes / 2**20:,.1f}"
        lines.append(f"{trial.size:>10}  {fits:<19}  {seconds:>12}  {rate:>9}  {peak:>8}")
    return "\n".join(lines)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    _of_device(device, "synchronize")


def start_peak(device: torch.device) -> None:
    """Let the device's allocator count its peak anew, where it counts."""
    _of_device(device, "reset_peak_memory_stats")


def peak_bytes(device: torch.device) -> int | None:
    """The most that the device's allocator gave out since :func:`start_peak`, or ``None``."""
    found = _of_device(device, "max_memory_allocated")
    return None if found is None else int(found)


def _of_device(device: torch.device, name: str) -> Any:
    function = getattr(getattr(torch, device.type, None), name, None)
    return function(device) if function is not None and device.type in ("cuda", "xpu") else None
