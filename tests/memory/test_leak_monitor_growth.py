"""Which rises are steady: against series made by hand, and the slope against the one that they were made with."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_speedkit.memory.leak_monitor_growth import Samples, steady_slope

_STEPS = range(128)


@pytest.mark.parametrize("slope", [0.5, 3.0, 1000.0])
def test_the_slope_is_found_under_noise_and_jumps(slope: float) -> None:
    draw = random.Random(0)
    values = [slope * step + draw.gauss(0, 5 * slope) for step in _STEPS]
    values[20], values[90] = 1e9, -1e9
    assert steady_slope(_STEPS, values) == pytest.approx(slope, rel=0.1)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("level", [7.0] * 128),
        ("noise", [random.Random(step).gauss(0, 1) for step in _STEPS]),
        ("fall", [-1.0 * step for step in _STEPS]),
        ("one jump", [1.0 if step > 40 else 0.0 for step in _STEPS]),
        ("plateau", [min(step, 60.0) for step in _STEPS]),
        ("caches that fill", [1 - 0.95**step for step in _STEPS]),
        ("collected now and then", [step % 40 for step in _STEPS]),
        ("too few to tell", [1.0 * step for step in range(31)]),
    ],
)
def test_what_is_no_steady_rise_has_no_slope(what: str, values: list[float]) -> None:
    assert steady_slope(range(len(values)), values) == 0.0, what


def test_samples_thin_out_evenly_and_keep_the_whole_run() -> None:
    samples = Samples(counters=2, room=8)
    due = 0
    for step in range(100):
        if step >= due:
            samples.add(step, (2 * step, -step))
            due = step + samples.stride
    steps = list(samples.steps)
    assert 4 <= len(samples) <= 8
    assert samples.stride == 16
    assert all(8 <= later - earlier <= 16 for earlier, later in itertools.pairwise(steps))
    assert list(samples.values(0)) == [2 * step for step in steps]
    assert list(samples.values(1)) == [-step for step in steps]
    samples.clear()
    assert (len(samples), samples.stride, list(samples.steps)) == (0, 1, [])
