from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_speedkit.architecture.backbone_limits import COSTS, LIMITS, OBJECTIVES, checked_budget, checked_objective
from lightning_speedkit.architecture.backbone_table import Backbone


def test_every_cost_has_a_limit_an_objective_and_a_field() -> None:
    fields = {field.name for field in dataclasses.fields(Backbone)}
    assert set(COSTS) == set(OBJECTIVES.values()) == set(LIMITS.values())
    assert set(COSTS) <= fields
    assert [limit for limit in LIMITS if limit.startswith("min_")] == ["min_training_samples_per_second"]


def test_a_budget_is_copied() -> None:
    given = {"max_parameters": 5_000_000}
    checked = checked_budget(given)
    checked["max_flops"] = 1.0
    assert given == {"max_parameters": 5_000_000}
    assert checked_budget(None) == {}


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ({"max_params": 3}, ValueError, "'max_params' is no limit. Did you mean 'max_parameters'"),
        ({"max_flops": 0}, ValueError, "max_flops=0 must be a finite number above 0"),
        ({"max_flops": "1e6"}, ValueError, "max_flops='1e6' must be a finite number"),
        ({"max_flops": True}, ValueError, "max_flops=True must be"),
        ({"max_flops": float("nan")}, ValueError, "max_flops=nan must be"),
        (5.0, TypeError, "must be a dict"),
    ],
)
def test_wrong_budgets(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checked_budget(budget)


def test_wrong_objectives() -> None:
    with pytest.raises(ValueError, match=r"objective='memoryy' is not one of 'latency', .* Did you mean 'memory'"):
        checked_objective("memoryy")
