"""The presets of this area: none, since which network a run trains is not a setting of its Trainer."""

from __future__ import annotations

from lightning_speedkit.registry import Preset

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = ()
