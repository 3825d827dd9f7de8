"""Tells memory that grows with every step from memory that rises and then stays.

What it does: keeps a bounded number of samples of a counter over the steps, and says how steeply it rises, if it does
so all the time. When it helps: a counter of memory jumps: caches fill, an allocator takes more than it needs, garbage
waits to be collected. What it costs: 16 medians when asked. Source: the slope is that of Theil (1950) and Sen (1968),
over medians of blocks; that it rises at all is Mann's test (1945).
"""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Sequence

__all__ = ["Samples", "steady_slope"]

_BLOCKS = 16
_CONCORDANT = 0.7  # of 16 blocks in random order, one in ten thousand sorts has as many pairs in order
_STILL = 0.5  # the second half has to rise at least half as steeply as the whole


def steady_slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """By how much the values rise per step, if they rise steadily to the end; otherwise 0.

    Args:
        steps: At which step each value was read, in order.
        values: As many; fewer than 32 are too few to tell.

    >>> steps = range(64)
    >>> steady_slope(steps, [3.0 * step for step in steps])
    3.0
    >>> steady_slope(steps, [min(step, 30) for step in steps]), steady_slope(steps, [step % 7 for step in steps])
    (0.0, 0.0)
    """
    count = len(values)
    if count < 2 * _BLOCKS:
        return 0.0
    borders = [round(number * count / _BLOCKS) for number in range(_BLOCKS + 1)]
    blocks = [slice(start, end) for start, end in itertools.pairwise(borders)]
    x = [statistics.median(steps[block]) for block in blocks]
    y = [statistics.median(values[block]) for block in blocks]
    pairs = list(itertools.combinations(range(_BLOCKS), 2))
    order = sum((y[b] > y[a]) - (y[b] < y[a]) for a, b in pairs) / len(pairs)
    slope = _median_slope(x, y)
    half = _BLOCKS // 2
    if order < _CONCORDANT or slope <= 0 or _median_slope(x[half:], y[half:]) < _STILL * slope:
        return 0.0
    return slope


def _median_slope(x: Sequence[float], y: Sequence[float]) -> float:
    pairs = itertools.combinations(range(len(x)), 2)
    return statistics.median((y[b] - y[a]) / (x[b] - x[a]) for a, b in pairs)


class Samples:
    """Counters over the steps, in memory that was taken before the first: when full, every other one is dropped.

    Args:
        counters: How many numbers a sample has.
        room: For so many samples, an even number.

    >>> samples = Samples(counters=1, room=4)
    >>> for step in range(6):
    ...     samples.add(step, (10 * step,))
    >>> list(samples.steps), list(samples.values(0)), samples.stride
    ([1.0, 3.0, 4.0, 5.0], [10.0, 30.0, 40.0, 50.0], 2)
    """

    def __init__(self, counters: int, room: int = 128) -> None:
        self._columns = [array("d", bytes(8 * room)) for _ in range(counters + 1)]
        self._room = room
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._count = 0
        self.stride = 1

    def __len__(self) -> int:
        return self._count

    @property
    def steps(self) -> array[float]:
        """At which steps the samples were taken."""
        return self._columns[0][: self._count]

    def values(self, counter: int) -> array[float]:
        """The numbers of one counter."""
        return self._columns[counter + 1][: self._count]

    def add(self, step: int, numbers: Sequence[float]) -> None:
        """Keep a sample. From now on one in ``stride`` steps is enough."""
        if self._count == self._room:
            half = self._room // 2
            for column in self._columns:
                column[:half] = column[1::2]
            self._count = half
            self.stride *= 2
        for column, number in zip(self._columns, (step, *numbers), strict=True):
            column[self._count] = number
        self._count += 1
