"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="quantize-int8",
        kind="compress",
        summary="An int8 copy for inference on a CPU when training ends, kept only if the validation metric holds.",
        patch=TrainerPatch(callbacks=(Part(QuantizeOnFitEnd, {}),)),
    ),
)
