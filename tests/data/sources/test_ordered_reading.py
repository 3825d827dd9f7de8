"""Reading by threads: the order, what is in memory, and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lightning_speedkit.data.sources.ordered_reading import read_in_order
from lightning_speedkit.data.sources.source import Item, bad_item, held_item
from lightning_speedkit.errors import ImageError, MissingExtraError, SourceError

THREADS = [1, 2, 5]


def slow_item(i: int) -> Item:
    def read() -> int:
        time.sleep(0.002 * (i % 3))
        return i

    return Item(f"item {i}", read)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_the_order_is_that_of_the_items(threads: int, count: int) -> None:
    outcomes = list(read_in_order(map(slow_item, range(count)), lambda x: x + 0.5, threads))
    assert outcomes == [(f"item {i}", i + 0.5, None) for i in range(count)]


def test_several_threads_read_at_once() -> None:
    together = threading.Barrier(2, timeout=20)  # broken unless two items are read at the same time
    items = iter([Item(str(i), together.wait) for i in range(16)])
    assert sum(1 for _ in read_in_order(items, None, 2)) == 16


def test_a_bounded_number_of_items_is_ahead_of_the_reader() -> None:
    asked = 0

    def items() -> Iterator[Item]:
        nonlocal asked
        for i in range(10_000):
            asked += 1
            yield held_item(str(i), i)

    outcomes = read_in_order(items(), None, 2)
    for _ in range(100):
        next(outcomes)
    assert asked <= 100 + 8 * (2 * 2 + 2)
    outcomes.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("speedkit-pack")]


@pytest.mark.parametrize("threads", THREADS)
def test_faults_keep_their_place(threads: int) -> None:
    def transform(value: int) -> int:
        if value == 4:
            raise SourceError("not this one")
        if value == 6:
            raise ImageError("nor this picture")
        return 100 // (value - 9)

    items = [bad_item("item 2", "gone") if i == 2 else held_item(f"item {i}", i) for i in range(12)]
    faults = {i: str(fault) for i, (_, _, fault) in enumerate(read_in_order(iter(items), transform, threads)) if fault}
    assert faults == {
        2: "item 2: gone",
        4: "item 4: not this one",
        6: "item 6: nor this picture",
        9: "item 9: the transform raised ZeroDivisionError: integer division or modulo by zero",
    }


@pytest.mark.parametrize("threads", THREADS)
def test_an_end_by_a_fault_comes_after_the_items_before_it(threads: int) -> None:
    def items() -> Iterator[Item]:
        yield from map(slow_item, range(21))
        raise SourceError("the rest is lost")

    outcomes = read_in_order(items(), None, threads)
    assert [next(outcomes)[1] for _ in range(21)] == list(range(21))
    with pytest.raises(SourceError, match="the rest is lost"):
        next(outcomes)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("error", [MemoryError(), MissingExtraError("x", extra="y", library="z"), KeyError("bug")])
def test_what_is_no_fault_of_a_sample_ends_the_reading(threads: int, error: Exception) -> None:
    def read() -> None:
        raise error

    with pytest.raises(type(error)):
        list(read_in_order(iter([held_item("a", 1), Item("b", read)]), None, threads))
