"""Training-efficiency techniques for PyTorch Lightning: callbacks, DataModules, strategies and presets by name.

Importing the package registers its strategy names with Lightning, and does nothing else.

>>> import lightning_speedkit
>>> "accumulate-4" in lightning_speedkit.presets.names()
True
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_speedkit.version import __version__

# The speedkit command loads what each subcommand needs, by __getattr__: its help does not wait for torch.
_STARTED = sys.argv[0] if getattr(sys, "argv", None) else ""
_IS_COMMAND = _STARTED.replace("\\", "/").rpartition("/")[2] in ("speedkit", "speedkit.exe") or (
    _STARTED == "-m" and sys.orig_argv[1:3] == ["-m", "lightning_speedkit"]
)
_AREAS = (
    *("errors", "presets", "measure", "architecture", "compress", "data", "memory", "optimize", "parallel"),
    "precision",
)

if TYPE_CHECKING or not _IS_COMMAND:
    from lightning_speedkit import presets
    from lightning_speedkit.architecture import (
        Backbone,
        BackboneTable,
        apply_plan,
        build_backbone,
        lighten,
        pick_backbone,
        published_accuracies,
    )
    from lightning_speedkit.compress import (
        Distillation,
        FakeQuantization,
        Pruning,
        QuantizationAwareTraining,
        QuantizeOnFitEnd,
        ShrinkPlan,
        ShrinkReport,
        StructuredPruning,
        convert_model,
        distillation_loss,
        load_quantized,
        load_shrunk,
        prune_weights,
        resize_to,
        shrink_model,
    )
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
    from lightning_speedkit.memory import (
        ActivationCheckpointing,
        BatchSizeSearch,
        CacheRelease,
        LeakMonitor,
        OOMSnapshot,
        PeakMemory,
        estimate_memory,
        find_batch_size,
        plan_checkpoints,
    )
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
    from lightning_speedkit.parallel import (
        HangWatch,
        ModelParallelPlan,
        PipelineStrategy,
        SpeedkitDDPStrategy,
        SpotInterruption,
        check_launch,
        newest_checkpoint,
        suggest_strategy,
    )
    from lightning_speedkit.precision import (
        ChannelsLast,
        CompileModel,
        Float8Precision,
        MatmulPrecision,
        SpeedkitMixedPrecision,
        fastest_precision,
        measure_precision,
    )
    from lightning_speedkit.presets import trainer_kwargs
if TYPE_CHECKING:
    from lightning_speedkit.cli import SpeedkitCLI

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AutoMicroBatch",
    "AverageWeights",
    "Backbone",
    "BackboneTable",
    "BatchSizeSearch",
    "CacheRelease",
    "ChannelsLast",
    "CompileModel",
    "CutMix",
    "DevicePrefetcher",
    "DeviceTransform",
    "Distillation",
    "FakeQuantization",
    "Float8Precision",
    "GradientClipping",
    "HangWatch",
    "ImageField",
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBWriter",
    "LRRangeTest",
    "LeakMonitor",
    "LoaderSettingsSearch",
    "MatmulPrecision",
    "MixUp",
    "ModelParallelPlan",
    "NonFiniteGuard",
    "Normalize",
    "OOMSnapshot",
    "OptimizerChoice",
    "PeakMemory",
    "PipelineStrategy",
    "Pruning",
    "QuantizationAwareTraining",
    "QuantizeOnFitEnd",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "RingLoader",
    "RunRecorder",
    "ScheduleChoice",
    "ScheduleFreeSwitch",
    "ShrinkPlan",
    "ShrinkReport",
    "SpeedkitCLI",
    "SpeedkitDDPStrategy",
    "SpeedkitDataModule",
    "SpeedkitError",
    "SpeedkitMixedPrecision",
    "SpikeGuard",
    "SpotInterruption",
    "StructuredPruning",
    "__version__",
    "apply_plan",
    "build_backbone",
    "build_optimizer",
    "build_schedule",
    "check_launch",
    "convert_model",
    "distillation_loss",
    "estimate_memory",
    "fastest_precision",
    "find_batch_size",
    "lighten",
    "load_quantized",
    "load_shrunk",
    "lr_range_test",
    "measure_precision",
    "newest_checkpoint",
    "optimizers_for",
    "pick_backbone",
    "plan_checkpoints",
    "presets",
    "prune_weights",
    "published_accuracies",
    "resize_to",
    "shrink_model",
    "stage_to_local",
    "suggest_loader",
    "suggest_strategy",
    "trainer_kwargs",
    "verify_lmdb",
    "write_lmdb",
]


def __getattr__(name: str) -> Any:
    if name == "SpeedkitCLI":  # jsonargparse, which it is built on, is an extra
        from lightning_speedkit.cli import SpeedkitCLI

        return SpeedkitCLI
    if name == "presets":
        return import_module("lightning_speedkit.presets")
    if name in __all__:
        for area in _AREAS:
            module = import_module(f"lightning_speedkit.{area}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
