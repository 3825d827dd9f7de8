"""The presets that save memory."""

from __future__ import annotations

from lightning_speedkit.memory.activation_checkpointing import ActivationCheckpointing
from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.cache_release import CacheRelease
from lightning_speedkit.memory.leak_monitor import LeakMonitor
from lightning_speedkit.memory.oom_snapshot import OOMSnapshot
from lightning_speedkit.memory.peak_memory import PeakMemory
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="checkpoint-activations",
        kind="memory",
        summary="Repeated blocks recompute their activations in the backward pass: less memory, one more forward.",
        patch=TrainerPatch(callbacks=(Part(ActivationCheckpointing),)),
    ),
    Preset(
        name="checkpoint-selective",
        kind="memory",
        summary="Repeated blocks recompute cheap operations only: matmuls, fused attention, convolutions are kept.",
        patch=TrainerPatch(callbacks=(Part(ActivationCheckpointing, {"policy": "selective"}),)),
    ),
    Preset(
        name="offload-activations",
        kind="memory",
        summary="What repeated blocks save for the backward waits in host memory; nothing is recomputed.",
        patch=TrainerPatch(callbacks=(Part(ActivationCheckpointing, {"policy": "offload"}),)),
        needs=("cuda",),
    ),
    Preset(
        name="largest-batch",
        kind="memory",
        summary="The largest batch that really trains is found when the fit starts.",
        patch=TrainerPatch(callbacks=(Part(BatchSizeSearch),)),
    ),
    Preset(
        name="fastest-batch",
        kind="memory",
        summary="The smallest batch within 5 % of the most samples per second is found when the fit starts.",
        patch=TrainerPatch(callbacks=(Part(BatchSizeSearch, {"target": "throughput"}),)),
    ),
    Preset(
        name="watch-memory",
        kind="memory",
        summary="Warns of leaks, logs peaks by phase, and writes down what filled the memory when it runs out.",
        patch=TrainerPatch(callbacks=(Part(LeakMonitor), Part(OOMSnapshot), Part(PeakMemory))),
    ),
    Preset(
        name="release-cache",
        kind="memory",
        summary="Gives unused memory back between training and validation, and where it is badly fragmented.",
        patch=TrainerPatch(callbacks=(Part(CacheRelease),)),
    ),
)
