"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="accumulate-4",
        kind="optimize",
        summary="One optimizer step per 4 batches, with the gradient of one batch of all their samples.",
        patch=TrainerPatch(callbacks=(Part(AccumulationScheduler, {"schedule": 4}),)),
    ),
)
