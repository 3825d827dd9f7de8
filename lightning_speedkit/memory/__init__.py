"""Memory: what a step keeps, and how to keep less of it."""

from lightning_speedkit.memory.activation_checkpointing import (
    ActivationCheckpointing,
    checkpoint_modules,
    uncheckpoint_modules,
)
from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_find import BatchSizeTrial, FoundBatchSize, find_batch_size
from lightning_speedkit.memory.cache_release import CacheRelease, release_cache
from lightning_speedkit.memory.checkpoint_budget import CheckpointPlan, plan_checkpoints
from lightning_speedkit.memory.leak_monitor import Leak, LeakMonitor
from lightning_speedkit.memory.memory_estimate import MemoryEstimate, estimate_memory
from lightning_speedkit.memory.oom_snapshot import OOMSnapshot
from lightning_speedkit.memory.peak_memory import PeakMemory

__all__ = [
    "ActivationCheckpointing",
    "BatchSizeSearch",
    "BatchSizeTrial",
    "CacheRelease",
    "CheckpointPlan",
    "FoundBatchSize",
    "Leak",
    "LeakMonitor",
    "MemoryEstimate",
    "OOMSnapshot",
    "PeakMemory",
    "checkpoint_modules",
    "estimate_memory",
    "find_batch_size",
    "plan_checkpoints",
    "release_cache",
    "uncheckpoint_modules",
]
