"""What is measured of an int8 model, held against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_speedkit.compress.quality import (
    alternating_seconds,
    metric_direction,
    metric_drop,
    relative_error,
    serialized_bytes,
)
from tests.compress.models import (
    mlp,
)


class TestQuality:
    def test_relative_error(self) -> None:
        a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])
        assert relative_error([a, b], [a, b]) == 0.0
        assert relative_error([a], [b]) == 1.0
        assert relative_error([b], [a]) == math.inf
        assert relative_error([a], [torch.tensor([3.0, math.nan])]) == math.inf
        assert relative_error([a], [a, a]) == math.inf
        assert relative_error([a], [torch.zeros(3)]) == math.inf

    @pytest.mark.parametrize(
        ("before", "after", "mode", "drop"),
        [
            (0.9, 0.89, "max", 0.01),
            (90.0, 89.1, "max", 0.01),
            (0.9, 0.95, "max", -0.05),
            (0.5, 0.55, "min", 0.1),
            (2.0, 1.0, "min", -0.5),
            (-2.0, -1.0, "min", 0.5),
            (0.0, 0.0, "min", 0.0),
            (0.0, 0.1, "min", math.inf),
            (0.9, math.nan, "max", math.inf),
            (0.9, -math.inf, "min", math.inf),
        ],
    )
    def test_metric_drop(self, before: float, after: float, mode: str, drop: float) -> None:
        assert metric_drop(before, after, mode) == pytest.approx(drop)

    def test_serialized_bytes_are_those_of_the_file(self, tmp_path: Path) -> None:
        state = mlp().state_dict()
        torch.save(dict(state), tmp_path / "state.pt")
        assert serialized_bytes(state) == pytest.approx((tmp_path / "state.pt").stat().st_size, rel=0.02)

    def test_functions_take_turns_and_are_bounded(self) -> None:
        order: list[str] = []
        functions = [lambda: order.append("a"), lambda: order.append("b"), lambda: order.append("c")]
        assert len(alternating_seconds(functions, budget_seconds=0.0)) == 3
        # once to warm up, then at least five rounds, every second one backwards
        assert "".join(order) == "abc" + "abc" + "cba" + "abc" + "cba" + "abc"
        order.clear()
        alternating_seconds(functions[:2], budget_seconds=60.0, at_most=7)
        assert len(order) == 16

    def test_seconds_are_medians_of_each_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("lightning_speedkit.compress.quality.time.perf_counter", lambda: now[0])
        costs = iter([9.0, 9.0, *(cost for start in (1.0, 9.0, 3.0, 2.0, 4.0) for cost in (start, start))])

        def spend() -> None:
            now[0] += next(costs)

        assert alternating_seconds([spend, spend], budget_seconds=0.0) == [3.0, 3.0]


def test_equal_infinities_are_no_difference_and_others_are_one() -> None:
    reference = torch.tensor([3.0, 4.0, -math.inf])  # a logit that a mask shut out
    assert relative_error([reference], [torch.tensor([3.0, 4.5, -math.inf])]) == pytest.approx(0.1)
    assert relative_error([reference], [torch.tensor([3.0, 4.0, math.inf])]) == math.inf
    assert relative_error([reference], [torch.tensor([3.0, 4.0, 5.0])]) == math.inf
    assert relative_error([torch.tensor([math.nan])], [torch.tensor([math.nan])]) == math.inf
    assert relative_error([], []) == 0.0


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val_loss", "min"),
        ("valLoss", "min"),
        ("val/MeanSquaredError", "min"),
        ("test-RMSE", "min"),
        ("word_error_rate", "min"),
        ("val_acc", "max"),
        ("MulticlassAccuracy", "max"),
        ("val_mAP", "max"),
    ],
)
def test_direction_of_a_metric(name: str, mode: str) -> None:
    assert metric_direction(name) == mode


def test_the_counter_of_bytes_takes_what_a_file_takes() -> None:
    assert serialized_bytes({}) > 0
    difference = serialized_bytes({"a": torch.zeros(5000)}) - serialized_bytes({"a": torch.zeros(1000)})
    assert difference == pytest.approx(16000, abs=128)
