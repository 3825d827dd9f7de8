"""Every preset of the kit, area by area: the one table in which names are looked up."""

from __future__ import annotations

from lightning_speedkit.architecture import presets as architecture
from lightning_speedkit.compress import presets as compress
from lightning_speedkit.data import presets as data
from lightning_speedkit.memory import presets as memory
from lightning_speedkit.optimize import presets as optimize
from lightning_speedkit.parallel import presets as parallel
from lightning_speedkit.precision import presets as precision
from lightning_speedkit.presets import bundles
from lightning_speedkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(
    (
        *precision.PRESETS,
        *optimize.PRESETS,
        *memory.PRESETS,
        *compress.PRESETS,
        *architecture.PRESETS,
        *parallel.PRESETS,
        *data.PRESETS,
        *bundles.PRESETS,
    )
)
