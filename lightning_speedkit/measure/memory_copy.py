"""How fast one core gathers rows from random places of a large memory into a buffer that is used again.

This is what a loader of plain tensors does at least, so no loader on one core is faster: what a loader reaches of it
says whether there is anything left to gain. Several cores can be faster together, as far as the memory allows.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

__all__ = ["measure_memory_copy"]

_LEAST_BATCH_BYTES = 1 << 18  # calling the copy costs nothing beside that many bytes
_ORDERS = 8
_SLICES = 5


def measure_memory_copy(row_bytes: int, *, rows: int = 128, source_bytes: int = 1 << 28, seconds: float = 0.5) -> float:
    """Bytes per second of copying ``rows`` random rows of ``row_bytes`` each, the fastest of five measurements.

    Rows of an odd size may be slower than longer ones. A short batch is made longer, up to 256 KiB, so that the cost
    of a call does not count.

    Args:
        row_bytes: The bytes of one sample.
        rows: Samples per batch.
        source_bytes: Size of the memory that rows are taken from; above the size of the caches, or the result is
            theirs. At least 16 rows are allocated.
        seconds: How long to measure, besides filling the memory.

    Raises:
        ValueError: An argument is not above 0.

    >>> measure_memory_copy(3072, seconds=0.05) > 1e6
    True
    """
    for name, value in (("row_bytes", row_bytes), ("rows", rows), ("source_bytes", source_bytes)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds must be a number, got {seconds!r}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be above 0 and finite, got {seconds}.")
    rows = max(rows, math.ceil(_LEAST_BATCH_BYTES / row_bytes))
    number = max(16, source_bytes // row_bytes)
    source = np.ones((number, row_bytes), dtype=np.uint8)  # ones, since pages of zeros are not there before a write
    target = np.ones((rows, row_bytes), dtype=np.uint8)
    random = np.random.default_rng(0)
    orders = [random.integers(number, size=rows) for _ in range(_ORDERS)]
    return max(_rate(source, target, orders, seconds / _SLICES) for _ in range(_SLICES))


def _rate(
    source: NDArray[np.uint8], target: NDArray[np.uint8], orders: list[NDArray[np.int64]], seconds: float
) -> float:
    count, start = 0, time.perf_counter()
    while True:
        # mode="clip" writes into the target at once, where "raise" would go through a buffer
        np.take(source, orders[count % len(orders)], axis=0, out=target, mode="clip")
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count * target.nbytes / elapsed
