"""The presets of this area."""

from __future__ import annotations

import pytest

from lightning_speedkit.compress.presets import PRESETS
from lightning_speedkit.registry import Preset


def test_these_are_the_presets() -> None:
    assert [preset.name for preset in PRESETS] == [
        *("quantize-int8", "quantize-aware", "prune", "prune-2-4", "prune-channels"),
    ]
    assert {preset.kind for preset in PRESETS} == {"compress"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_preset_builds_a_new_callback_each_time(preset: Preset) -> None:
    (part,) = preset.patch.callbacks  # type: ignore[union-attr]
    assert part.build() is not part.build()
