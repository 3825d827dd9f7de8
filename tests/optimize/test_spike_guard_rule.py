"""What is a spike, by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from lightning_speedkit.optimize.spike_guard_rule import is_spike

NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "recent", "arguments", "expected"),
    [
        (2.99, [1.0] * 10, {}, False),
        (3.0, [1.0] * 10, {}, True),
        (1e9, [1.0] * 9, {}, False),  # too few to judge by
        (3.0, [5.0] + [1.0] * 10, {"deviations": 0}, True),  # the mean is of the last 10
        (5.0, [1.0, 1.0, 6.0], {"threshold": 0.5, "window": 3, "deviations": 0}, False),  # better than the last one
        (3.0, [1.0] * 10, {"threshold": 3.0}, False),
        (0.9, [0.1] * 10, {"margin": 1.0}, False),
        (1.2, [0.1] * 10, {"margin": 1.0}, True),
        (-0.5, [-1.0] * 10, {}, False),
        (1.0, [-1.0] * 10, {}, True),
        (-5.0, [1.0] * 10, {}, False),
        (math.inf, [], {}, True),
        # 64 times 0 and 64 times 2: a mean of 1 and a deviation of sqrt(128 / 127); the last two have the mean 1 too
        (7.02, [0.0, 2.0] * 64, {"window": 2}, False),
        (7.03, [0.0, 2.0] * 64, {"window": 2}, True),
        (7.03, [1e6] + [0.0, 2.0] * 64, {"window": 2}, True),  # no more than 128 are looked at
        (7.02, [0.0, 2.0] * 64, {"window": 2, "deviations": 5.9}, True),
        (-math.inf, [1.0], {}, True),
        (NAN, [1.0], {}, True),
    ],
)
def test_what_is_a_spike(loss: float, recent: list[float], arguments: dict[str, float], expected: bool) -> None:
    assert is_spike(loss, recent, **arguments) is expected
