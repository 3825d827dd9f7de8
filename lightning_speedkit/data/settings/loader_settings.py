"""What is tried to find the settings of a DataLoader, and what is chosen from what was measured. Pure: no processes.

The order of trials: 0, 1, 2, 3, 4, 6, 8, 12, 16 ... workers, until two numbers in a row bring less than 5 % over the
best so far, or the next number does not fit in the limits; then more prefetching at the best number; then the
candidates that are close are measured a second time. Of what is within 5 % of the best, the fewest workers are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LoaderLimits", "LoaderSettings", "LoaderTrial", "choose_trial", "next_trial", "worker_numbers"]

GAIN = 1.05
PREFETCH, MORE_PREFETCH = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTrial:
    """One setting, measured. ``failure`` says why there is no number; it is empty otherwise. ``to_try`` is what fails,
    as Python: a sample, or a batch of samples of which each loads alone; it is empty where that is not known.

    ``seconds_start`` lie between asking for an iterator and its first batch, and are no part of the rate.
    ``worker_bytes`` is the memory that a worker shares with nobody, of the largest one; 0 where it is not known.
    """

    num_workers: int
    prefetch_factor: int | None = None
    samples_per_second: float = 0.0
    seconds_start: float = 0.0
    batch_bytes: int = 0
    worker_bytes: int = 0
    failure: str = ""
    to_try: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """What the workers of one loader may take: their number, their memory, and the shared memory of their batches."""

    max_workers: int
    memory_bytes: int | None = None
    shared_bytes: int | None = None

    def refuse(self, num_workers: int, prefetch: int, trials: Sequence[LoaderTrial]) -> str:
        """Why so many workers are not tried, from what the trials before it took; empty if they fit."""
        batch = max((trial.batch_bytes for trial in trials), default=0)
        worker = max((trial.worker_bytes for trial in trials), default=0)
        if num_workers > self.max_workers:
            return f"at most {self.max_workers} workers"
        if self.shared_bytes is not None and num_workers * prefetch * batch > self.shared_bytes:
            return f"their batches would take more than {self.shared_bytes / 2**20:.0f} MiB of shared memory"
        if self.memory_bytes is not None and num_workers * worker > self.memory_bytes:
            return f"they would take more than {self.memory_bytes / 2**20:.0f} MiB of memory"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings for torch's DataLoader, and what they were chosen from.

    >>> settings = LoaderSettings(num_workers=2, prefetch_factor=2, pin_memory=False, persistent_workers=True)
    >>> settings.arguments()
    {'num_workers': 2, 'pin_memory': False, 'persistent_workers': True, 'prefetch_factor': 2}
    >>> LoaderSettings(num_workers=0).arguments()
    {'num_workers': 0, 'pin_memory': False, 'persistent_workers': False}
    """

    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    multiprocessing_context: str | None = None
    trials: tuple[LoaderTrial, ...] = ()
    reason: str = ""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``DataLoader(...)``; what would be refused without workers is left out."""
        arguments: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
        }
        if self.num_workers > 0:
            arguments["prefetch_factor"] = self.prefetch_factor
            if self.multiprocessing_context is not None:
                arguments["multiprocessing_context"] = self.multiprocessing_context
        return arguments

    def describe(self) -> str:
        """The choice and its reason in a line, and below it a line for each setting that was measured."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        lines = [f"{chosen}: {self.reason}" if self.reason else chosen]
        return "\n".join([*lines, *(f"  {_line(trial)}" for trial in self.trials)])


def worker_numbers(most: int) -> Iterator[int]:
    """The numbers of workers to try, up to ``most``.

    >>> list(worker_numbers(10))
    [0, 1, 2, 3, 4, 6, 8, 10]
    """
    number, step = 0, 1
    while number < most:
        yield number
        number += step
        if number >= 4 and number & (number - 1) == 0:  # 4, 8, 16: from here on in steps of half of it
            step = number // 2
    yield most


def next_trial(trials: Sequence[LoaderTrial], limits: LoaderLimits) -> tuple[int, int] | None:
    """Workers and prefetch factor to measure next, or ``None`` when enough is known. Of none, the factor is 0.

    >>> next_trial([], LoaderLimits(max_workers=8))
    (0, 0)
    """
    tried = [trial for trial in trials if trial.prefetch_factor in (None, PREFETCH)]
    if (number := _next_number(tried, limits)) is not None:
        return number, PREFETCH if number else 0
    good = _fastest_of_each(trials)
    if len(good) < 2:
        return None
    best = max(good, key=lambda trial: trial.samples_per_second)
    deeper = (best.num_workers, MORE_PREFETCH)
    is_new = all((trial.num_workers, trial.prefetch_factor) != deeper for trial in trials)
    if best.num_workers and is_new and not limits.refuse(*deeper, trials):
        return deeper
    for trial in sorted(good, key=lambda trial: -trial.samples_per_second)[:3]:  # whoever leads has to do it twice
        times = sum(_setting(other) == _setting(trial) for other in trials)
        if times < 2 and trial.samples_per_second * GAIN * GAIN >= best.samples_per_second:
            return trial.num_workers, trial.prefetch_factor or 0
    return None


def choose_trial(trials: Sequence[LoaderTrial], *, prefer_workers: bool = False) -> tuple[LoaderTrial, str]:
    """The setting with the fewest workers among those within 5 % of the fastest, and the reason in words.

    With ``prefer_workers``, one worker or more is chosen over none where one of them is within 5 %: it loads while
    the device computes. A setting that was measured more than once counts with its fastest time: what other programs
    took away is no property of a setting. ``ValueError`` if no trial has a number.
    """
    good = _fastest_of_each(trials)
    if not good:
        raise ValueError("No trial has a number to choose from.")
    best = max(good, key=lambda trial: trial.samples_per_second)
    close = [trial for trial in good if trial.samples_per_second * GAIN >= best.samples_per_second]
    if prefer_workers and any(trial.num_workers for trial in close):
        close = [trial for trial in close if trial.num_workers]
    chosen = min(close, key=lambda trial: (trial.num_workers, trial.prefetch_factor or 0))
    return chosen, _reason(chosen, best, good)


def _next_number(tried: Sequence[LoaderTrial], limits: LoaderLimits) -> int | None:
    best, misses, seen = 0.0, 0, set()
    for trial in tried:
        if trial.failure:
            return None
        if trial.num_workers in seen:
            continue
        seen.add(trial.num_workers)
        misses = 0 if trial.samples_per_second >= best * GAIN else misses + 1
        best = max(best, trial.samples_per_second)
    if misses >= 2:
        return None
    number = next((number for number in worker_numbers(limits.max_workers) if number not in seen), None)
    return None if number is None or limits.refuse(number, PREFETCH, tried) else number


def _fastest_of_each(trials: Sequence[LoaderTrial]) -> list[LoaderTrial]:
    fastest: dict[tuple[int, int | None], LoaderTrial] = {}
    failed = {_setting(trial) for trial in trials if trial.failure}
    for trial in trials:
        before = fastest.get(_setting(trial))
        if _setting(trial) not in failed and (before is None or trial.samples_per_second > before.samples_per_second):
            fastest[_setting(trial)] = trial
    return list(fastest.values())


def _setting(trial: LoaderTrial) -> tuple[int, int | None]:
    return trial.num_workers, trial.prefetch_factor


def _reason(chosen: LoaderTrial, best: LoaderTrial, good: Sequence[LoaderTrial]) -> str:
    rate = f"{chosen.samples_per_second:,.0f} samples/s"
    none = next((trial for trial in good if trial.num_workers == 0), None)
    if len(good) == 1:
        return f"{rate}, nothing else could be measured"
    if chosen.num_workers == 0:
        runner_up = max((t for t in good if t.num_workers), key=lambda t: t.samples_per_second)
        return f"{rate}; {_workers(runner_up)} load {runner_up.samples_per_second:,.0f}"
    text = rate
    if none is not None and none.samples_per_second:
        text += f", {chosen.samples_per_second / none.samples_per_second:.2f} times the rate without workers"
    if best.num_workers > chosen.num_workers:
        text += f"; {_workers(best)} bring less than 5 % more"
    return text


def _workers(trial: LoaderTrial) -> str:
    return f"{trial.num_workers} worker{'s' if trial.num_workers != 1 else ''}"


def _line(trial: LoaderTrial) -> str:
    prefetch = f", prefetch {trial.prefetch_factor}" if trial.prefetch_factor is not None else ""
    if trial.failure:
        return f"{_workers(trial)}{prefetch}: failed: {trial.failure}"
    worker = f", {trial.worker_bytes / 2**20:.0f} MiB each" if trial.worker_bytes else ""
    return (
        f"{_workers(trial)}{prefetch}: {trial.samples_per_second:,.0f} samples/s "
        f"after {trial.seconds_start:.2f} s{worker}"
    )
