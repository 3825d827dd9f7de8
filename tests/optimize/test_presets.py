"""The presets of the area build what they say."""

from __future__ import annotations

from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.optimize.presets import PRESETS


def test_accumulate_4_builds_a_schedule_of_4() -> None:
    (preset,) = [preset for preset in PRESETS if preset.name == "accumulate-4"]
    assert not callable(preset.patch)
    (part,) = preset.patch.callbacks
    built = part.build()
    assert type(built) is AccumulationScheduler
    assert built.schedule == {0: 4}
    assert part.build() is not built
