"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.data.settings.loader_auto import LoaderSettingsSearch
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="loader-auto",
        kind="data",
        summary="The workers and the prefetching that load your training DataLoader fastest, measured when fit starts.",
        patch=TrainerPatch(callbacks=(Part(LoaderSettingsSearch),)),
    ),
)
