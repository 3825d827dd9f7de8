"""The rates and shares of StepTiming, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_speedkit.facts import Hardware, RunFacts, StepTiming

TIMING = StepTiming(steps=4, samples=32, seconds_wall=2.0, seconds_data=0.5, seconds_compute=1.25)


def test_rates_and_shares() -> None:
    assert TIMING.seconds_per_step == 0.5
    assert TIMING.samples_per_second == 16.0
    assert TIMING.seconds_other == 0.25
    assert (TIMING.data_share, TIMING.compute_share, TIMING.other_share) == (0.25, 0.625, 0.125)
    assert TIMING.describe() == "4 steps, 500 ms each: 25 % data, 62 % compute, 12 % other; 16 samples/s"


def test_without_a_step_nothing_is_claimed() -> None:
    empty = StepTiming()
    for value in (empty.seconds_per_step, empty.samples_per_second, empty.data_share, empty.other_share):
        assert math.isnan(value)
    assert empty.describe() == "no step was counted"


def test_rounding_of_a_clock_never_makes_other_negative() -> None:
    assert StepTiming(steps=1, seconds_wall=0.3, seconds_data=0.1, seconds_compute=0.2000001).seconds_other == 0.0


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TIMING.steps = 5  # type: ignore[misc]


def test_all_ranks_together() -> None:
    run = RunFacts(hardware=Hardware(accelerator="cpu", device_name="a CPU"), train=TIMING, world_size=3)
    assert run.samples_per_second == 48.0
