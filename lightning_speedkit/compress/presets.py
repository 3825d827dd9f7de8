"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="quantize-int8",
        kind="compress",
        summary="an int8 copy for CPU inference at the end of the fit, kept if the validation metric holds",
        patch=TrainerPatch(callbacks=(Part(QuantizeOnFitEnd, {}),)),
    ),
)
