"""Reads items by several threads and hands their samples out in order, with a bounded number of them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from lightning_speedkit.data.sources.source import Item
from lightning_speedkit.errors import ImageError, SourceError, SpeedkitError

__all__ = ["Outcome", "read_in_order"]

Outcome = tuple[str, Any, SourceError | None]
"""The place of an item, its sample, and what was wrong with it."""

_CHUNK = 8
_CHUNKS_PER_THREAD = 2


def read_in_order(
    items: Iterator[Item], transform: Callable[[Any], Any] | None, threads: int
) -> Generator[Outcome, None, None]:
    """What reading each item gave, in the order of the items, whatever the number of threads.

    Args:
        items: asked for in turn, by the calling thread.
        transform: called with each sample.
        threads: how many read at once; with 1 the calling thread does it.

    >>> from lightning_speedkit.data.sources.source import held_item
    >>> list(read_in_order(iter([held_item("a", 1), held_item("b", 2)]), lambda x: 10 * x, threads=2))
    [('a', 10, None), ('b', 20, None)]
    """
    if threads == 1:
        for item in items:
            yield _outcome(item, transform)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="speedkit-pack")
    waiting: deque[Future[list[Outcome]]] = deque()
    end: Exception | None = None
    try:
        while True:
            chunk: list[Item] = []
            try:
                chunk.extend(islice(items, _CHUNK))
            except Exception as error:  # told after the items before it, as with one thread
                end = error
            waiting.append(pool.submit(_chunk_outcomes, chunk, transform))
            if len(chunk) < _CHUNK:
                break
            if len(waiting) > threads * _CHUNKS_PER_THREAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
        if end is not None:
            raise end
    finally:
        pool.shutdown(cancel_futures=True)


def _chunk_outcomes(chunk: list[Item], transform: Callable[[Any], Any] | None) -> list[Outcome]:
    return [_outcome(item, transform) for item in chunk]


def _outcome(item: Item, transform: Callable[[Any], Any] | None) -> Outcome:
    try:
        sample = item.read()
    except SourceError as error:
        return item.place, None, error
    if transform is None:
        return item.place, sample, None
    try:
        return item.place, transform(sample), None
    except (SourceError, ImageError) as error:
        fault = SourceError(f"{item.place}: {error}")
    except (SpeedkitError, MemoryError):
        raise
    except Exception as error:
        fault = SourceError(f"{item.place}: the transform raised {type(error).__name__}: {error}")
    return item.place, None, fault
