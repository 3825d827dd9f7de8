"""Schedules against a written-out loop, and against the steps of real runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_speedkit.optimize import AccumulationScheduler, checked_schedule, count_steps, factor_at
from tests.optimize.line import batches_of, steps

SCHEDULES = st.dictionaries(st.integers(0, 6), st.integers(1, 5), min_size=1, max_size=4).map(
    lambda pairs: dict(sorted(pairs.items()))
)


@given(SCHEDULES, st.integers(0, 12), st.integers(0, 8), st.sampled_from(["epoch", "step"]))
def test_steps_are_those_of_a_written_out_run(schedule: dict[int, int], batches: int, epochs: int, unit: str) -> None:
    taken = waiting = 0
    for epoch in range(epochs):
        for batch in range(batches):
            position = epoch if unit == "epoch" else taken
            factor = next((schedule[start] for start in reversed(schedule) if start <= position), 1)
            assert factor_at(schedule, position) == factor
            waiting += 1
            if waiting == factor or batch == batches - 1:
                taken, waiting = taken + 1, 0
    assert count_steps(schedule, batches, epochs, unit) == taken


@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("schedule", [1, 4, {0: 1, 1: 4}, {1: 2, 2: 6}, {2: 100}, {2: 3, 5: 1, 8: 4}])
def test_steps_are_those_that_a_fit_takes(schedule: int | dict[int, int], unit: str) -> None:
    taken = steps(batches_of(1, 1, 1, 1, 1, 1), AccumulationScheduler(schedule, unit=unit), max_epochs=4)
    assert len(taken) == count_steps(schedule, 6, 4, unit)


def test_a_schedule_is_a_copy() -> None:
    mine = {0: 3, 5: 2}
    copy = checked_schedule(mine)
    mine[0] = 9
    assert list(copy.items()) == [(0, 3), (5, 2)]


def test_starts_out_of_order_are_told() -> None:
    with pytest.raises(ValueError, match=r"schedule=\{5: 2, 0: 3\}: the starts must increase; write \{0: 3, 5: 2\}"):
        checked_schedule({5: 2, 0: 3})


def test_an_unknown_unit_is_told() -> None:
    with pytest.raises(ValueError, match="unit='batch' is unknown; use 'epoch' or 'step'"):
        count_steps(2, 6, 1, "batch")
