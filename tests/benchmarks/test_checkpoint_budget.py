"""The benchmark's parts do what it says; its seconds are not looked at here."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch

from benchmarks.checkpoint_budget import (
    Inverted,
    allocated_peak,
    best_set,
    least_peak,
    measure,
    peaks_of_all_sets,
    verdicts,
)
from lightning_speedkit.memory import checkpoint_modules, uncheckpoint_modules


def test_the_best_set_is_the_cheapest_that_is_measured_to_be_within() -> None:
    seconds = {"a": 3.0, "b": 2.0, "c": 2.0}
    saved = {"a": 0.4, "b": 0.3, "c": 0.25}
    table = numpy.array(list(itertools.product([False, True], repeat=3)))
    reckoned = 1.0 - table @ numpy.array(list(saved.values()))

    def fraction(chosen: tuple[str, ...]) -> float:
        return 1.01 - sum(saved[path] for path in chosen)  # a little more than was reckoned

    assert best_set(seconds, table, reckoned, fraction, 0.71) == ("b",)
    assert best_set(seconds, table, reckoned, fraction, 0.705) == ("a",)
    assert best_set(seconds, table, reckoned, fraction, 0.5) == ("b", "c")
    assert best_set(seconds, table, reckoned, fraction, 0.07) == ("a", "b", "c")
    assert best_set(seconds, table, reckoned, fraction, 0.05) is None
    assert least_peak(list(seconds), table, reckoned, fraction) == pytest.approx(0.06)  # all three


def test_the_reckoned_peaks_of_all_sets_are_those_that_the_allocator_records() -> None:
    blocks = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), Inverted(8, 8), Inverted(8, 16, 2), Inverted(16, 16))
    x, paths = torch.randn(8, 3, 24, 24), ["1", "2", "3"]

    def run() -> None:
        blocks(x).square().mean().backward()

    run()
    plain = allocated_peak(run)
    table, reckoned = peaks_of_all_sets(blocks, paths, run)
    assert len(table) == len({tuple(row) for row in table}) == 8
    for row, expected in zip(table, reckoned, strict=True):
        chosen = [path for path, taken in zip(paths, row, strict=True) if taken]
        if chosen:
            checkpoint_modules(blocks, chosen)
        peak = allocated_peak(run)
        uncheckpoint_modules(blocks)
        assert abs(peak - expected) <= 0.05 * plain, chosen


def test_a_verdict_needs_the_peak_and_the_time() -> None:
    def told(peak: float, extra: float) -> str:
        at = {"plan found": 1.0, "best set found": 1.0}
        at |= {"peak of plan over plain, allocator": peak, "extra time over the best's": extra}
        return verdicts({f"60%: {metric}": value for metric, value in at.items()}, [0.6])[0]

    assert told(0.6, 1.05).startswith("60%: met")
    assert told(0.601, 1.0).startswith("60%: NOT MET")
    assert told(0.5, 1.06).startswith("60%: NOT MET")
    least = "least peak of all sets over plain, allocator"
    none = {"20%: plan found": 0.0, "20%: best set found": 0.0}
    assert verdicts({**none, least: 0.234}, [0.2])[0].startswith("20%: impossible: least is 23.4% of plain")
    assert "NOT MET" in verdicts({**none, least: 0.2}, [0.2])[0]
    assert "NOT MET" in verdicts({**none, least: 0.234, "20%: best set found": 1.0}, [0.2])[0]


def test_the_peak_is_what_the_allocator_has_given_out_at_once() -> None:
    def run() -> None:
        x = torch.ones(1 << 18)  # 1 MiB
        y = x * 2
        del x
        y.mul_(2)
        z = y * 2  # beside y
        del y, z

    assert 2 << 20 <= allocated_peak(run) < (2 << 20) + 100  # and the factors of the products


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["transformer", "convolutional"])
def test_the_planned_set_is_within_the_budget_and_the_allocator_says_about_the_same(name: str) -> None:
    told = measure(name, depth=4, batch=4, steps=1, budgets=[0.7])
    assert told["70%: peak of plan over plain"] <= 0.7
    assert told["70%: peak of plan over plain, allocator"] <= 0.71
    assert 0 < told["70%: blocks recomputed"] < 4
    assert told["sets"] == 16
    assert 0 < told["least peak of all sets over plain, allocator"] <= told["70%: peak of plan over plain, allocator"]
    assert told["70%: recomputation over the best's"] > 0
