"""Orders of indices, by what they give and by how often they ask what they stand for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from lightning_speedkit.data.settings.loader_orders import BegunOrder, EndlessOrder, HandedOrder


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_order_goes_through_all_samples_before_it_repeats_one(shuffle: bool) -> None:
    order = EndlessOrder(10, 4, shuffle, seed=3)
    read = [index for batch in itertools.islice(order, 5) for index in batch]
    if shuffle:
        assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
        assert read[:10] != read[10:]
    else:
        start = read[0]
        assert read == [(start + i) % 10 for i in range(20)]
    single = EndlessOrder(10, None, shuffle, seed=3)
    assert list(itertools.islice(single, 20)) == read


def test_an_order_of_very_many_samples_is_not_made_in_advance() -> None:
    (batch,) = itertools.islice(EndlessOrder(10**12, 100, True, seed=0), 1)
    assert len(batch) == 100
    assert all(0 <= index < 10**12 for index in batch)


def test_every_sample_is_read_about_as_often() -> None:
    order = itertools.islice(EndlessOrder(7, 1, True, seed=1), 70)
    assert set(Counter(index for (index,) in order).values()) == {10}


class _Source:
    """Counts how often it is asked, and draws each time."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.asked = 0
        self.generator = torch.Generator().manual_seed(1)
        self.drawn: list[float] = []

    def __iter__(self) -> Iterator[int]:
        for item in range(self.items):
            self._draw()
            yield item
        self._draw()  # as RandomSampler does at its end

    def _draw(self) -> None:
        self.asked += 1
        self.drawn.append(torch.rand(1, generator=self.generator).item())


def test_a_begun_order_gives_all_items_and_does_not_ask_for_one_more() -> None:
    source = _Source(5)
    order = BegunOrder(iter(source), 5, [])
    assert list(order) == [0, 1, 2, 3, 4]
    assert list(order) == []
    assert source.asked == 5
    order.ask_to_the_end()
    assert source.asked == 6


def test_items_asked_for_early_are_not_lost() -> None:
    source = _Source(5)
    order = BegunOrder(iter(source), 5, [])
    order.ask(3)
    assert source.asked == 3
    assert next(order) == 0
    order.ask(4)
    order.ask(2)
    assert source.asked == 4
    assert list(order) == [1, 2, 3, 4]
    order.ask(9)
    assert source.asked == 6
    assert list(order) == []


def test_a_sampler_that_is_shorter_than_it_says_ends() -> None:
    order = BegunOrder(iter(_Source(2)), 5, [])
    order.ask(5)
    assert list(order) == [0, 1]
    assert list(BegunOrder(iter(_Source(2)), 5, [])) == [0, 1]
    unknown = BegunOrder(iter(_Source(2)), None, [])
    assert list(unknown) == [0, 1]
    unknown.ask_to_the_end()


@pytest.mark.parametrize("taken", [1, 3])
def test_draws_beyond_what_the_loader_would_have_asked_are_taken_back(taken: int) -> None:
    plain = _Source(6)
    for _ in zip(range(taken), plain, strict=False):
        pass
    source = _Source(6)
    order = BegunOrder(iter(source), 6, [source.generator])
    ahead = [next(order) for _ in range(5)]
    order.ask(taken)  # so many batches were handed out
    assert (ahead, source.asked) == ([0, 1, 2, 3, 4], 5)
    order.take_back()
    assert torch.equal(source.generator.get_state(), plain.generator.get_state())
    order.take_back()
    assert torch.equal(source.generator.get_state(), plain.generator.get_state())


def test_nothing_is_taken_back_where_nothing_was_asked() -> None:
    generator = torch.Generator().manual_seed(2)
    state = generator.get_state()
    BegunOrder(iter([]), 0, [generator]).take_back()
    assert torch.equal(generator.get_state(), state)


def test_a_handed_order_is_the_one_that_was_handed_over() -> None:
    handed = HandedOrder()
    assert list(handed) == []
    handed.order = iter([3, 1])
    assert iter(handed) is iter(handed)
    assert list(handed) == [3, 1]
