"""The table of everything public that plugs into a Trainer. A new technique adds its line here, and is then held to
every rule of this folder; ``test_table.py`` fails while a public name is missing."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_speedkit import (
    AccumulationScheduler,
    ActivationCheckpointing,
    AutoMicroBatch,
    AverageWeights,
    BatchSizeSearch,
    CacheRelease,
    ChannelsLast,
    CompileModel,
    Distillation,
    Float8Precision,
    GradientClipping,
    HangWatch,
    LeakMonitor,
    LoaderSettingsSearch,
    LRRangeTest,
    MatmulPrecision,
    NonFiniteGuard,
    OOMSnapshot,
    OptimizerChoice,
    PeakMemory,
    Pruning,
    QuantizationAwareTraining,
    QuantizeOnFitEnd,
    RunRecorder,
    ScheduleChoice,
    ScheduleFreeSwitch,
    SpeedkitMixedPrecision,
    SpikeGuard,
    SpotInterruption,
    StructuredPruning,
)
from lightning_speedkit.registry import Part


@dataclass(frozen=True)
class Case:
    """One callback: a setting that does something, and one that must change nothing, bit for bit."""

    name: str
    working: Part
    neutral: Part


CALLBACKS = (
    Case(
        "AccumulationScheduler",
        working=Part(AccumulationScheduler, {"schedule": {0: 2, 2: 3}}),
        neutral=Part(AccumulationScheduler, {"schedule": 1}),
    ),
    Case(
        "ActivationCheckpointing",
        working=Part(ActivationCheckpointing, {"modules": ["Block"], "policy": "selective"}),
        neutral=Part(ActivationCheckpointing, {"modules": ["Block"]}),
    ),
    Case(
        "AutoMicroBatch",
        working=Part(AutoMicroBatch, {"grow_after": 8}),
        neutral=Part(AutoMicroBatch, {}),
    ),
    Case(
        "AverageWeights",
        working=Part(AverageWeights, {"decay": 0.9, "start": 2}),
        neutral=Part(AverageWeights, {"decay": 0.0}),
    ),
    Case(
        "BatchSizeSearch",
        working=Part(BatchSizeSearch, {"start": 2, "limit": 6}),
        neutral=Part(BatchSizeSearch, {"start": 4, "limit": 4}),
    ),
    Case(
        "CacheRelease",
        working=Part(CacheRelease, {"check_every": 2, "trim_host": True}),
        neutral=Part(CacheRelease, {}),
    ),
    Case(
        "ChannelsLast",
        working=Part(ChannelsLast, {}),
        neutral=Part(ChannelsLast, {"check": False}),
    ),
    Case(
        "CompileModel",
        working=Part(CompileModel, {"backend": "eager", "eager_steps": 2}),
        neutral=Part(CompileModel, {"backend": "eager", "eager_steps": 0}),
    ),
    Case(
        "Distillation",
        working=Part(Distillation, {"teacher": "tests.conformance.models:classifier"}),
        neutral=Part(Distillation, {"teacher": "tests.conformance.models:classifier", "weight": 0.0}),
    ),
    Case(
        "GradientClipping",
        working=Part(GradientClipping, {"by": "zclip", "limit": 1.0, "warmup": 3}),
        neutral=Part(GradientClipping, {"limit": float("inf")}),
    ),
    Case(
        "LRRangeTest",
        working=Part(LRRangeTest, {"lowest": 1e-3, "highest": 0.1, "steps": 5}),
        neutral=Part(LRRangeTest, {"steps": 5}),
    ),
    Case(
        "HangWatch",
        working=Part(HangWatch, {"seconds": 100.0, "end": True}),
        neutral=Part(HangWatch, {}),
    ),
    Case(
        "LeakMonitor",
        working=Part(LeakMonitor, {"warmup_steps": 0}),
        neutral=Part(LeakMonitor, {}),
    ),
    Case(
        "LoaderSettingsSearch",
        working=Part(LoaderSettingsSearch, {"seconds": 0.1, "max_workers": 1}),
        neutral=Part(LoaderSettingsSearch, {"seconds": 0.1, "max_workers": 1}),
    ),
    Case(
        "MatmulPrecision",
        # convolutions only: another matmul level may change what a CPU computes, and validation is compared exactly
        working=Part(MatmulPrecision, {"matmul": "highest", "convolutions": "ieee"}),
        neutral=Part(MatmulPrecision, {"matmul": None}),
    ),
    Case(
        "NonFiniteGuard",
        working=Part(NonFiniteGuard, {}),
        neutral=Part(NonFiniteGuard, {}),
    ),
    Case(
        "OOMSnapshot",
        working=Part(OOMSnapshot, {"largest": 3}),
        neutral=Part(OOMSnapshot, {}),
    ),
    Case(
        "OptimizerChoice",
        working=Part(OptimizerChoice, {"optimizer": "schedule-free", "options": {"warmup_steps": 4}}),
        neutral=Part(OptimizerChoice, {"decay_all": True, "options": {"fused": False}}),
    ),
    Case(
        "PeakMemory",
        working=Part(PeakMemory, {}),
        neutral=Part(PeakMemory, {}),
    ),
    Case(
        "Pruning",
        working=Part(Pruning, {"target_sparsity": 0.7, "start": 2, "end": 16, "every": 3, "regrow": 0.2}),
        neutral=Part(Pruning, {"target_sparsity": 0.0}),
    ),
    Case(
        "QuantizationAwareTraining",
        working=Part(QuantizationAwareTraining, {"start": 2, "freeze_ranges": 9}),
        neutral=Part(QuantizationAwareTraining, {"start": 1_000_000, "freeze_ranges": 1_000_000}),
    ),
    Case(
        "QuantizeOnFitEnd",
        working=Part(QuantizeOnFitEnd, {"backend": "torch-ao-dynamic", "objective": "size"}),
        neutral=Part(QuantizeOnFitEnd, {"backend": "torch-ao-dynamic", "skip": ["*"]}),
    ),
    Case(
        "RunRecorder",
        working=Part(RunRecorder, {}),
        neutral=Part(RunRecorder, {}),
    ),
    Case(
        "ScheduleChoice",
        working=Part(ScheduleChoice, {"schedule": "warmup-cosine", "total_steps": 24}),
        neutral=Part(ScheduleChoice, {"schedule": "constant"}),
    ),
    Case(
        "ScheduleFreeSwitch",
        working=Part(ScheduleFreeSwitch, {}),
        neutral=Part(ScheduleFreeSwitch, {}),
    ),
    Case(
        "SpikeGuard",
        working=Part(SpikeGuard, {"action": "rollback", "snapshot_every": 2, "window": 3}),
        neutral=Part(SpikeGuard, {}),
    ),
    Case(
        "SpotInterruption",
        working=Part(SpotInterruption, {"dirpath": "saved", "every_n_steps": 2}),
        neutral=Part(SpotInterruption, {"dirpath": "saved"}),
    ),
    Case(
        "StructuredPruning",
        working=Part(StructuredPruning, {"start_epoch": 0, "steps": 2}),
        neutral=Part(StructuredPruning, {"ratio": 0.0}),
    ),
)

STRATEGIES = (
    *("speedkit_ddp", "speedkit_ddp_static", "speedkit_ddp_fp16", "speedkit_ddp_bf16", "speedkit_ddp_powersgd"),
    *("speedkit_model_parallel", "speedkit_fsdp2_offload", "speedkit_hsdp", "speedkit_tensor_parallel_2"),
    "speedkit_pipeline",
)

PLUGINS = (Part(SpeedkitMixedPrecision, {"precision": "bf16-mixed"}), Part(Float8Precision, {"emulate": True}))

DATAMODULES = ("LMDBDataModule", "SpeedkitDataModule")
