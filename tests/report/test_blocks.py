"""Ratios and checks of the blocks, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_speedkit.report import Bar, BarChart, Line, LineChart, Table, Text


@pytest.mark.parametrize(
    ("better", "value", "told"),
    [
        ("lower", 2.0, ("2.00×", "faster")),
        ("lower", 8.0, ("2.00×", "slower")),
        ("higher", 8.0, ("2.00×", "faster")),
        ("higher", 2.0, ("2.00×", "slower")),
        ("lower", 4.01, ("1.00×", "the same")),
        ("lower", 3.99, ("1.00×", "the same")),
        ("lower", 0.1, ("40.0×", "faster")),
        ("lower", 0.0, ("–", "")),
        ("higher", 0.0, ("–", "")),
    ],
)
def test_ratios(better: Any, value: float, told: tuple[str, str]) -> None:
    chart = BarChart("t", [Bar("base", 4.0), Bar("other", value)], baseline="base", better=better)
    assert chart.ratio(chart.bars[1]) == told
    assert chart.is_loss(chart.bars[1]) == (told[1] == "slower")
    assert chart.ratio(chart.bars[0]) == ("", "baseline")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Bar("a", -1.0), "cannot be drawn"),
        (lambda: Bar("a", math.nan), "cannot be drawn"),
        (lambda: Bar("a", [1.0, math.inf]), "cannot be drawn"),
        (lambda: BarChart("t", []), "no bars"),
        (lambda: BarChart("t", [Bar("a", [1, 2])]), "has 2 values; parts asks for 1"),
        (lambda: BarChart("t", [Bar("a", 1)], baseline="b"), r"use one of \['a'\]"),
        (lambda: BarChart("t", [Bar("a", 1)], better="more"), "lower or higher"),  # type: ignore[arg-type]
        (lambda: Line("a", [1], [1, 2]), "1 x and 2 y"),
        (lambda: Line("a", [], []), "at least 1"),
        (lambda: Line("a", [1], [math.nan]), "not finite"),
        (lambda: LineChart("t", []), "no lines"),
        (lambda: Table(["a"], [["x", "y"]]), "row 0 has 2 cells, the header has 1"),
        (lambda: Text("t", tone="loud"), "plain, note or warning"),  # type: ignore[arg-type]
    ],
)
def test_wrong_blocks_are_told(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_columns_of_numbers() -> None:
    table = Table(["name", "n", "text", "mixed", "none"], [["1", 2, "a", "98 %", "–"], ["2", 3.5, "b", "x", "n/a"]])
    assert [table.is_numeric(column) for column in range(5)] == [False, True, False, False, True]
