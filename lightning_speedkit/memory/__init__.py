"""Memory: what a step keeps, and how to keep less of it."""

from lightning_speedkit.memory.activation_checkpointing import (
    ActivationCheckpointing,
    checkpoint_modules,
    uncheckpoint_modules,
)

__all__ = ["ActivationCheckpointing", "checkpoint_modules", "uncheckpoint_modules"]
