"""Windows against a written-out walk through the micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_speedkit.optimize.accumulation_bounds import WindowBounds


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_windows_of_changing_factors_follow_one_another(factors: list[int]) -> None:
    bounds, batch = WindowBounds(0, factors[0]), 0
    for place, factor in enumerate(factors):
        if place:
            assert bounds.is_over_at(batch)
            assert bounds.next_start(batch) == batch
            bounds.begin(batch, factor)
        assert bounds.is_last(batch - 1)  # as a run asks that resumes here
        for inside in range(factor):
            assert not bounds.is_over_at(batch)
            assert bounds.is_last(batch) == (inside == factor - 1)
            batch += 1


@pytest.mark.parametrize(("batch", "start"), [(3, 3), (4, 3), (5, 3), (6, 6), (11, 9)])
def test_missing_batches_do_not_move_windows(batch: int, start: int) -> None:
    bounds = WindowBounds(0, 3)
    assert bounds.is_over_at(batch)
    assert bounds.next_start(batch) == start
    assert bounds.is_last(batch) == ((batch + 1) % 3 == 0)


def test_a_window_of_no_factor_lasts_until_it_is_told() -> None:
    bounds = WindowBounds(2, None)
    assert [bounds.is_last(batch) for batch in (1, 2, 3, 4)] == [True, False, False, False]
    assert not bounds.is_over_at(9)
    bounds.end_at(4)
    assert [bounds.is_last(batch) for batch in (3, 4, 5)] == [False, True, False]
    assert (bounds.is_over_at(4), bounds.is_over_at(5), bounds.next_start(5)) == (False, True, 5)
    bounds.begin(5, None)
    assert not bounds.is_last(5)
