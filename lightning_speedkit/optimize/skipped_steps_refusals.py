"""What the guards check before they start: their arguments, and whether this Trainer and module can be guarded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

__all__ = ["checked_limit", "refuse_guard", "refuse_pruning", "refuse_repeats"]


def checked_limit(name: str, value: Any) -> int:
    """``value``, if it is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number of 1 or more; got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name}={value!r} must be 1 or more.")
    return value


def refuse_guard(guard: Callback, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Raise if this Trainer and module cannot be guarded."""
    name = type(guard).__name__
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"{name} works with automatic optimization, and {type(pl_module).__name__} sets "
            "automatic_optimization = False. Remove the callback, and call has_non_finite_gradient and drop_gradients "
            "of lightning_speedkit.optimize before your optimizer steps."
        )
    if sum(isinstance(callback, type(guard)) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        raise MisconfigurationException(f"Two {name} callbacks would skip the same steps. Keep one of them.")
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise MisconfigurationException(
            f"{name} does not work with {type(trainer.strategy).__name__}, which keeps gradients in a form of its own. "
            "Use ModelParallelStrategy (FSDP2), or remove the callback."
        )


def refuse_repeats(guard: Callback, trainer: pl.Trainer) -> None:
    """Raise if an optimizer evaluates its closure several times: a step of it cannot be left out from inside."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            f"{type(guard).__name__} does not work with LBFGS, which evaluates a batch several times. Use another "
            "optimizer, or remove the callback."
        )


def refuse_pruning(guard: Callback, trainer: pl.Trainer) -> None:
    """Raise if parameters get other names during the run: a snapshot keeps them by name."""
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{type(guard).__name__} cannot go back to a snapshot beside ModelPruning, which renames parameters. Use "
            "action='skip', or remove one of the two."
        )
