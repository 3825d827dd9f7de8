"""Lengths of windows against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_speedkit.optimize.accumulation_plan import WindowPlan


def test_a_schedule_gives_factors() -> None:
    plan = WindowPlan({1: 3, 4: 2})
    assert [plan.factor(position) for position in (0, 1, 3, 4, 9, 0)] == [1, 3, 3, 2, 2, 1]
    assert [plan.divisor(position, 7, 2) for position in (0, 1, 4)] == [1, 3, 2]
    assert plan.accumulates()
    assert not WindowPlan(1).accumulates()
    assert not WindowPlan({0: 1, 5: 1}).accumulates()


def test_a_target_is_reached() -> None:
    plan = WindowPlan(target={0: 8, 2: 20})
    assert plan.factor(0) is None
    assert plan.accumulates()
    assert [plan.is_reached(samples, 0) for samples in (7, 8, 9)] == [False, True, True]
    assert [plan.is_reached(samples, 2) for samples in (19, 20)] == [False, True]


@pytest.mark.parametrize(
    ("samples", "ranks", "expected"), [(8, 1, 3), (8, 2, 2), (5, 2, 2), (20, 1, 1), (90, 4, 1), (0, 2, 1)]
)
def test_losses_are_divided_by_about_the_number_of_micro_batches(samples: int, ranks: int, expected: int) -> None:
    plan = WindowPlan(target=20)
    assert plan.divisor(0, samples, ranks) == expected
    assert plan.divisor(0, torch.tensor(samples), ranks) == 1


@pytest.mark.parametrize(
    ("arguments", "batch_size", "expected"),
    [
        ({"schedule": 4}, None, 4),  # 4 and 2, twice
        ({"schedule": {0: 1, 1: 4}}, 8, 8),
        ({"schedule": {0: 1, 2: 4}, "unit": "step"}, None, 5),  # 1 1 4 | 4 2
        ({"target": 20}, 8, 4),  # 3 micro-batches a window
        ({"target": {0: 8, 1: 20}}, 8, 8),
        ({"target": {0: 8, 2: 20}, "unit": "step"}, 8, 6),  # 1 1 3 1 | 3 3
        ({"target": 20}, None, None),
    ],
)
def test_steps_of_two_epochs_of_six_batches(arguments: Any, batch_size: int | None, expected: int | None) -> None:
    assert WindowPlan(**arguments).steps(6, 2, batch_size) == expected
