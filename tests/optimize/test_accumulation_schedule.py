"""Schedules against a written-out loop, and against the steps of real runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_speedkit.optimize import AccumulationScheduler, checked_schedule, count_steps, factor_at
from tests.optimize.line import batches_of, steps

SCHEDULES = st.dictionaries(st.integers(0, 6), st.integers(1, 5), min_size=1, max_size=4)


@given(SCHEDULES, st.integers(0, 12), st.integers(0, 8))
def test_steps_are_those_of_a_written_out_run(schedule: dict[int, int], batches: int, epochs: int) -> None:
    factor = taken = waiting = 0
    for epoch in range(epochs):
        factor = schedule.get(epoch, factor) or 1
        assert factor_at(schedule, epoch) == factor
        for batch in range(batches):
            waiting += 1
            if waiting == factor or batch == batches - 1:
                taken, waiting = taken + 1, 0
    assert count_steps(schedule, batches, epochs) == taken


@pytest.mark.parametrize("schedule", [1, 4, {0: 1, 1: 4}, {1: 2, 2: 6}, {2: 100}])
def test_steps_are_those_that_a_fit_takes(schedule: int | dict[int, int]) -> None:
    taken = steps(batches_of(1, 1, 1, 1, 1, 1), AccumulationScheduler(schedule), max_epochs=4)
    assert len(taken) == count_steps(schedule, 6, 4)


def test_a_schedule_is_sorted_and_a_copy() -> None:
    mine = {5: 2, 0: 3}
    assert list(checked_schedule(mine).items()) == [(0, 3), (5, 2)]
    assert list(mine.items()) == [(5, 2), (0, 3)]
