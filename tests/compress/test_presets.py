"""The preset of this area."""

from __future__ import annotations

from lightning_speedkit.compress.presets import PRESETS


def test_preset_builds_a_new_callback_each_time() -> None:
    (preset,) = PRESETS
    assert (preset.name, preset.kind) == ("quantize-int8", "compress")
    (part,) = preset.patch.callbacks  # type: ignore[union-attr]
    assert part.build() is not part.build()
    assert part.build().report is None
