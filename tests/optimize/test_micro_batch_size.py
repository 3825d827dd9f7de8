"""The limit falls after failures, comes back by tries, and never goes in circles."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize


def _batch(size: MicroBatchSize, samples: int, fits: int) -> int:
    """Compute one batch where only ``fits`` samples fit; returns how many tries it took."""
    tries = 1
    while (tried := size.at_most(samples)) > fits:
        assert size.shrink(tried)
        tries += 1
    size.note_success(samples)
    size.grow()
    return tries


def test_it_halves_until_it_fits_and_stays_there() -> None:
    size = MicroBatchSize(grow_after=None)
    assert [_batch(size, 64, fits=10) for _ in range(50)] == [4] + [1] * 49
    assert size.limit == 8
    assert size.at_most(5) == 5


def test_it_comes_back_when_memory_does() -> None:
    size = MicroBatchSize(grow_after=10)
    _batch(size, 64, fits=10)
    assert [_batch(size, 64, fits=64) for _ in range(40)] == [1] * 40
    assert size.limit == 64


def test_tries_that_fail_become_rare() -> None:
    size = MicroBatchSize(grow_after=10)
    tries = [_batch(size, 64, fits=10) for _ in range(1000)]
    # One lost try each after 10, 20, 40, 80, 160 and 320 batches; the next one would come at 1270.
    assert [index for index, count in enumerate(tries) if count > 1] == [0, 10, 30, 70, 150, 310, 630]
    assert set(tries[1:]) == {1, 2}
    assert size.limit == 8


def test_the_wait_has_an_end() -> None:
    size = MicroBatchSize(grow_after=1)
    for _ in range(10_000):
        _batch(size, 4, fits=2)
    assert size.wait == 64


def test_batches_that_fit_whole_count_for_nothing() -> None:
    size = MicroBatchSize(grow_after=2)
    _batch(size, 64, fits=10)
    for _ in range(10):
        _batch(size, 8, fits=10)
    assert (size.limit, size.done) == (8, 1)  # the one success is that of the first batch


def test_a_try_is_proven_only_by_a_batch_that_is_large_enough() -> None:
    size = MicroBatchSize(grow_after=1)
    _batch(size, 16, fits=4)
    assert size.limit == 8  # a try
    _batch(size, 3, fits=4)
    assert _batch(size, 16, fits=4) == 2  # back to what was proven, not to half of the try
    assert (size.limit, size.wait) == (4, 2)


@pytest.mark.parametrize(("smallest", "tried"), [(1, [7, 3, 1]), (2, [7, 3, 2]), (7, [7])])
def test_the_floor_is_tried_and_then_there_is_no_more(smallest: int, tried: list[int]) -> None:
    size, seen = MicroBatchSize(smallest), []
    while True:
        seen.append(size.at_most(7))
        if not size.shrink(seen[-1]):
            break
    assert seen == tried


def test_ranks_take_the_smallest_limit_and_the_longest_wait() -> None:
    ranks = [MicroBatchSize(grow_after=5) for _ in range(3)]
    for _ in range(6):
        _batch(ranks[1], 32, fits=8)
    _batch(ranks[1], 32, fits=8)  # its try fails: it waits 10
    rows = [rank.row() for rank in ranks]
    for rank in ranks:
        rank.adopt([max(column) for column in zip(*rows, strict=True)])
    assert [(rank.limit, rank.wait) for rank in ranks] == [(8, 10)] * 3
    assert len({tuple(rank.row()) for rank in ranks}) == 1
    untouched = [MicroBatchSize(), MicroBatchSize()]
    untouched[0].adopt(untouched[1].row())
    assert untouched[0].limit is None


def test_a_checkpoint_keeps_what_was_learnt() -> None:
    size = MicroBatchSize(grow_after=5)
    for _ in range(7):
        _batch(size, 32, fits=8)
    other = MicroBatchSize(grow_after=5)
    other.load_state_dict(size.state_dict())
    assert (other.limit, other.wait) == (8, 10)


@pytest.mark.parametrize("options", [{"smallest": 0}, {"grow_after": 0}])
def test_arguments_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        MicroBatchSize(**options)


@pytest.mark.parametrize("wrong", [{"smallest": "1"}, {"smallest": True}, {"smallest": None}, {"grow_after": 2.0}])
def test_what_is_no_whole_number_is_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a whole number"):
        MicroBatchSize(**wrong)
