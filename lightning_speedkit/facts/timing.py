"""How long the steps of a training run took, and on what the time went."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["StepTiming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """The time of the counted steps of one process, split in three.

    One step is one batch through ``training_step``; with gradient accumulation several of them make one step of the
    optimizer. ``seconds_data`` is the time in which training waited for the next batch to be on its device,
    ``seconds_compute`` the time in forward, backward and optimizer. What is left of ``seconds_wall``, in callbacks,
    loggers and the loop itself, is :attr:`seconds_other`. Sums run over all counted steps, medians over the last of
    them. Everything is in seconds; with no counted step the rates are ``nan``.

    >>> timing = StepTiming(
    ...     steps=10, samples=320, seconds_wall=2.0, seconds_data=1.5, seconds_compute=0.4,
    ...     median_seconds_per_step=0.2, median_seconds_data=0.15, median_seconds_compute=0.04,
    ... )
    >>> timing.samples_per_second, timing.seconds_per_step, timing.data_share
    (160.0, 0.2, 0.75)
    >>> print(timing.describe())
    10 steps, 200 ms each: 75 % data, 20 % compute, 5 % other; 160 samples/s
    """

    steps: int = 0
    samples: int = 0
    seconds_wall: float = 0.0
    seconds_data: float = 0.0
    seconds_compute: float = 0.0
    median_seconds_per_step: float = 0.0
    median_seconds_data: float = 0.0
    median_seconds_compute: float = 0.0

    @property
    def seconds_other(self) -> float:
        """Neither data nor compute: callbacks, loggers, the loop."""
        return max(0.0, self.seconds_wall - self.seconds_data - self.seconds_compute)

    @property
    def seconds_per_step(self) -> float:
        """The mean."""
        return self.seconds_wall / self.steps if self.steps else math.nan

    @property
    def samples_per_second(self) -> float:
        """Of this process; a run on several ranks does that many times more."""
        return self.samples / self.seconds_wall if self.seconds_wall else math.nan

    @property
    def data_share(self) -> float:
        """The part of the time spent waiting for data, 0 to 1."""
        return self._share(self.seconds_data)

    @property
    def compute_share(self) -> float:
        """The part of the time spent in forward, backward and optimizer, 0 to 1."""
        return self._share(self.seconds_compute)

    @property
    def other_share(self) -> float:
        """The part of the time spent on neither, 0 to 1."""
        return self._share(self.seconds_other)

    def describe(self) -> str:
        """One line for a person."""
        if not self.steps:
            return "no step was counted"
        return (
            f"{self.steps} steps, {self.seconds_per_step * 1e3:.3g} ms each: {self.data_share:.0%} data, "
            f"{self.compute_share:.0%} compute, {self.other_share:.0%} other; {self.samples_per_second:,.0f} samples/s"
        ).replace("%", " %")

    def _share(self, seconds: float) -> float:
        return seconds / self.seconds_wall if self.seconds_wall else math.nan
