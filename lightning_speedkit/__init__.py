"""Training-efficiency techniques for PyTorch Lightning: callbacks, DataModules, strategies and presets by name.

Importing the package registers its strategy names with Lightning, and does nothing else.

>>> import lightning_speedkit
>>> "accumulate-4" in lightning_speedkit.presets.names()
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_speedkit import presets
from lightning_speedkit.compress import QuantizeOnFitEnd, load_quantized
from lightning_speedkit.data import (
    CutMix,
    DevicePrefetcher,
    DeviceTransform,
    ImageField,
    LMDBDataModule,
    LMDBDataset,
    LMDBWriter,
    LoaderSettingsSearch,
    MixUp,
    Normalize,
    RandomCrop,
    RandomErase,
    RandomFlip,
    RingLoader,
    SpeedkitDataModule,
    stage_to_local,
    suggest_loader,
    verify_lmdb,
    write_lmdb,
)
from lightning_speedkit.errors import SpeedkitError
from lightning_speedkit.measure import RunRecorder
from lightning_speedkit.memory import ActivationCheckpointing
from lightning_speedkit.optimize import (
    AccumulationScheduler,
    AutoMicroBatch,
    AverageWeights,
    GradientClipping,
    LRRangeTest,
    NonFiniteGuard,
    OptimizerChoice,
    ScheduleChoice,
    ScheduleFreeSwitch,
    SpikeGuard,
    build_optimizer,
    build_schedule,
    lr_range_test,
    optimizers_for,
)
from lightning_speedkit.parallel import SpeedkitDDPStrategy
from lightning_speedkit.precision import SpeedkitMixedPrecision, fastest_precision
from lightning_speedkit.presets import trainer_kwargs
from lightning_speedkit.version import __version__

if TYPE_CHECKING:
    from lightning_speedkit.cli import SpeedkitCLI

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AutoMicroBatch",
    "AverageWeights",
    "CutMix",
    "DevicePrefetcher",
    "DeviceTransform",
    "GradientClipping",
    "ImageField",
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBWriter",
    "LRRangeTest",
    "LoaderSettingsSearch",
    "MixUp",
    "NonFiniteGuard",
    "Normalize",
    "OptimizerChoice",
    "QuantizeOnFitEnd",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "RingLoader",
    "RunRecorder",
    "ScheduleChoice",
    "ScheduleFreeSwitch",
    "SpeedkitCLI",
    "SpeedkitDDPStrategy",
    "SpeedkitDataModule",
    "SpeedkitError",
    "SpeedkitMixedPrecision",
    "SpikeGuard",
    "__version__",
    "build_optimizer",
    "build_schedule",
    "fastest_precision",
    "load_quantized",
    "lr_range_test",
    "optimizers_for",
    "presets",
    "stage_to_local",
    "suggest_loader",
    "trainer_kwargs",
    "verify_lmdb",
    "write_lmdb",
]


def __getattr__(name: str) -> Any:
    if name == "SpeedkitCLI":  # jsonargparse, which it is built on, is an extra
        from lightning_speedkit.cli import SpeedkitCLI

        return SpeedkitCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
