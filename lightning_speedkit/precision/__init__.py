"""Numerical precision and compiled code: what this device runs fastest, and settings that last for one run."""

from lightning_speedkit.precision.autocast import fastest_precision
from lightning_speedkit.precision.channels_last import ChannelsLast, to_channels_last_
from lightning_speedkit.precision.compile import CompileModel, compile_modules, uncompile_modules
from lightning_speedkit.precision.float8 import Float8Precision
from lightning_speedkit.precision.matmul import MatmulPrecision, set_matmul_precision
from lightning_speedkit.precision.mixed import SpeedkitMixedPrecision
from lightning_speedkit.precision.timing import PrecisionTiming, measure_precision

__all__ = [
    "ChannelsLast",
    "CompileModel",
    "Float8Precision",
    "MatmulPrecision",
    "PrecisionTiming",
    "SpeedkitMixedPrecision",
    "compile_modules",
    "fastest_precision",
    "measure_precision",
    "set_matmul_precision",
    "to_channels_last_",
    "uncompile_modules",
]
