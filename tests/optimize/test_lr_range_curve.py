"""The suggestion against curves whose steepest point is known, and the plot."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.optimize.lr_range_curve import LRRange, suggest_rate

RATES = tuple(10.0 ** (8 * x / 99 - 7) for x in range(100))


def _falls(rate: float, middle: float = 1e-2) -> float:
    """Falls from 2.3 to 0.8 with the steepest point over log(rate) in the middle, then diverges."""
    return 2.3 - 1.5 / (1 + (middle / rate) ** 1.5) + (1e3 * rate if rate > 1 else 0.0)


@pytest.mark.parametrize("middle", [1e-4, 1e-2])
def test_the_suggestion_is_the_steepest_point(middle: float) -> None:
    suggestion = suggest_rate(RATES, [_falls(rate, middle) for rate in RATES])
    assert suggestion is not None
    assert abs(math.log10(suggestion / middle)) < 0.05


def test_noise_moves_it_little_and_alone_gives_none() -> None:
    found, alone = [], 0
    for seed in range(60):
        noise = random.Random(seed)
        found.append(suggest_rate(RATES, [_falls(rate) + noise.gauss(0, 0.2) for rate in RATES]))
        alone += suggest_rate(RATES, [2.3 + noise.gauss(0, 0.3) for _ in RATES]) is not None
    assert all(rate is not None and abs(math.log10(rate / 1e-2)) < 0.5 for rate in found)
    assert alone <= 6


def test_there_is_none_where_nothing_falls_or_too_little_was_measured() -> None:
    assert suggest_rate(RATES, [2.0 + rate for rate in RATES]) is None
    assert suggest_rate(RATES[:4], [4.0, 3.0, 2.0, 1.0]) is None
    assert suggest_rate([], []) is None
    assert suggest_rate(RATES[:5], [5.0, 4.0, 3.0, 2.0, 1.0]) == RATES[2]


def test_a_negative_loss_is_as_good_as_another() -> None:
    losses = [_falls(rate) for rate in RATES]
    assert suggest_rate(RATES, [loss - 100.0 for loss in losses]) == suggest_rate(RATES, losses)


def test_smoothed_is_the_median_around_a_point() -> None:
    assert LRRange(RATES[:5], (1.0, 2.0, 6.0, 2.0, 9.0)).smoothed() == (2.0, 2.0, 2.0, 4.0, 6.0)


def test_the_median_shows_a_valley_of_a_few_steps() -> None:
    losses = [1.0 if 50 <= step < 55 else 2.0 for step in range(100)]
    assert LRRange(RATES, tuple(losses)).smoothed() == tuple(losses)


@pytest.mark.parametrize("ending", ["svg", "PNG"])
def test_the_plot_is_written(tmp_path: Path, ending: str) -> None:
    curve = LRRange(RATES, tuple(_falls(rate) for rate in RATES), diverged=True)
    path = tmp_path / "new" / f"curve.{ending}"
    curve.plot(path)
    content = path.read_bytes()
    assert content.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
    if ending == "svg":
        assert b"suggestion: 0.01" in content
        curve.plot(tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == content


def test_a_plot_of_little_or_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LRRange((1e-7,), (1.0,)).plot(tmp_path / "one.svg")
    with pytest.raises(ValueError, match=r"\.svg, \.png"):
        LRRange((1e-7,), (1.0,)).plot("curve.pdf")
    with pytest.raises(ValueError, match="measured no loss"):
        LRRange((), ()).plot("curve.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"lightning-speedkit\[report\]"):
        LRRange((1e-7,), (1.0,)).plot("curve.svg")
