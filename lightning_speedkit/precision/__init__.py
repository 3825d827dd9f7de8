"""Numerical precision: what this device runs fastest, and mixed precision that follows the device."""

from lightning_speedkit.precision.autocast import fastest_precision
from lightning_speedkit.precision.mixed import SpeedkitMixedPrecision

__all__ = ["SpeedkitMixedPrecision", "fastest_precision"]
