"""The record of a run: what is derived in it, by hand."""

from __future__ import annotations

import math

from lightning_speedkit.facts import Hardware, RunFacts, StepTiming

CPU = Hardware(accelerator="cpu", device_name="a CPU")


def test_all_ranks_together_are_that_many_times_as_fast() -> None:
    train = StepTiming(steps=10, samples=80, seconds_wall=4.0)
    assert RunFacts(hardware=CPU, train=train).samples_per_second == 20.0
    assert RunFacts(hardware=CPU, train=train, world_size=3).samples_per_second == 60.0


def test_a_run_without_counted_steps_has_no_rate() -> None:
    train = StepTiming(steps=0, samples=0, seconds_wall=0.0)
    assert math.isnan(RunFacts(hardware=CPU, train=train).samples_per_second)
