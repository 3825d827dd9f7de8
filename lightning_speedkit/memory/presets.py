"""The presets that save memory."""

from __future__ import annotations

from lightning_speedkit.memory.activation_checkpointing import ActivationCheckpointing
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="checkpoint-activations",
        kind="memory",
        summary="Repeated blocks recompute their activations in the backward pass: less memory, one more forward.",
        patch=TrainerPatch(callbacks=(Part(ActivationCheckpointing),)),
    ),
)
