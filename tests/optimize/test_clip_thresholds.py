"""The thresholds against plain Python that follows the papers word for word."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

from lightning_speedkit.optimize.clip_thresholds import PercentileLimit, ZScoreLimit


def _zclip(norms: list[float], z: float, smoothing: float, warmup: int) -> list[float]:
    """ZClip with adaptive scaling, in doubles: moments of the warm-up, then moving averages of what was allowed."""
    start = norms[:warmup]
    limits = list(start)
    mean, variance = statistics.fmean(start), statistics.pvariance(start)
    for norm in norms[warmup:]:
        score = (norm - mean) / (math.sqrt(variance) + 1e-6)
        limit = mean + z * math.sqrt(variance) / (score / z) if score > z else norm
        limits.append(limit)
        mean = smoothing * mean + (1 - smoothing) * limit
        variance = smoothing * variance + (1 - smoothing) * (limit - mean) ** 2
    return limits


def _norms(seed: int = 3, count: int = 120) -> list[float]:
    generator = random.Random(seed)
    return [generator.uniform(0.5, 1.5) * (20.0 if place % 17 == 16 and place > 30 else 1.0) for place in range(count)]


@pytest.mark.parametrize(("z", "smoothing", "warmup"), [(2.5, 0.97, 25), (1.0, 0.5, 2), (3.0, 0.9, 10)])
def test_zclip_is_that_of_the_paper(z: float, smoothing: float, warmup: int) -> None:
    norms = _norms()
    limit = ZScoreLimit(z, smoothing, warmup)
    found = [limit(torch.tensor(norm, dtype=torch.float64)).item() for norm in norms]
    assert found == pytest.approx(_zclip(norms, z, smoothing, warmup), rel=1e-4)
    assert sum(a < b for a, b in zip(found, norms, strict=True)) >= 5


def test_a_norm_that_is_not_finite_is_not_counted() -> None:
    plain, disturbed = ZScoreLimit(warmup=5), ZScoreLimit(warmup=5)
    for place, norm in enumerate(_norms(count=40)):
        if place % 7 == 3:
            disturbed(torch.tensor(math.nan if place % 2 else math.inf))
        assert torch.equal(plain(torch.tensor(norm)), disturbed(torch.tensor(norm)))


@pytest.mark.parametrize("percentile", [10.0, 50.0, 100.0])
def test_a_percentile_of_the_last_norms(percentile: float) -> None:
    norms, limit = _norms(count=30), PercentileLimit(percentile, history=8)
    for place, norm in enumerate(norms):
        kept = sorted(norms[max(0, place - 7) : place + 1])
        at = percentile / 100 * (len(kept) - 1)
        low, high = kept[math.floor(at)], kept[math.ceil(at)]
        assert limit(torch.tensor(norm)).item() == pytest.approx(low + (high - low) * (at - math.floor(at)), rel=1e-5)


def test_a_percentile_passes_over_what_is_not_finite() -> None:
    limit = PercentileLimit(100.0, history=4)
    assert math.isnan(limit(torch.tensor(math.nan)).item())
    assert limit(torch.tensor(2.0)).item() == 2.0
    assert limit(torch.tensor(math.inf)).item() == 2.0


@pytest.mark.parametrize("make", [lambda: ZScoreLimit(warmup=3), lambda: PercentileLimit(30.0, history=6)])
def test_goes_on_from_its_state(make: Any) -> None:
    norms, whole, first = _norms(count=40), make(), make()
    expected = [whole(torch.tensor(norm)).item() for norm in norms]
    for norm in norms[:20]:
        first(torch.tensor(norm))
    second = make()
    second.load_state_dict(first.state_dict())
    assert [second(torch.tensor(norm)).item() for norm in norms[20:]] == expected[20:]


def test_another_history_is_told() -> None:
    with pytest.raises(ValueError, match="history=5"):
        PercentileLimit(history=5).load_state_dict(PercentileLimit(history=6).state_dict())
