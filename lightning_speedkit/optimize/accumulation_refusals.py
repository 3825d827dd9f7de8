"""The Trainers and modules that AccumulationScheduler cannot accumulate with, and what to do instead."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["check_optimizers", "check_trainer", "refuse_repeats"]


def check_trainer(trainer: pl.Trainer, pl_module: pl.LightningModule, kind: type[Callback]) -> None:
    """Raise :class:`MisconfigurationException` if a callback of this kind cannot work with the Trainer and module."""
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"AccumulationScheduler works with automatic optimization, and {type(pl_module).__name__} sets "
            "automatic_optimization = False. Remove the callback, and use AccumulationWindow of "
            "lightning_speedkit.optimize in your training_step."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"AccumulationScheduler has to see each batch, and {type(pl_module).__name__}.training_step takes the "
            "dataloader_iter. Let it take (batch, batch_idx), or remove the callback."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and AccumulationScheduler set the "
            "same thing. Remove one of them."
        )
    others = [c for c in trainer.callbacks if isinstance(c, (kind, GradientAccumulationScheduler))]  # type: ignore[attr-defined]
    if len(others) > 1:
        names = " and ".join(type(other).__name__ for other in others)
        raise MisconfigurationException(f"{names} set the same thing: the accumulation factor. Keep one of them.")
    _check_strategy(trainer)


def _check_strategy(trainer: pl.Trainer) -> None:
    known = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    if not known or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"AccumulationScheduler does not work with {type(trainer.strategy).__name__}, which keeps unfinished "
            "gradients out of reach: it supports one device, DDP and ModelParallelStrategy (FSDP2). Remove the "
            "callback, and set Trainer(accumulate_grad_batches=...) if the strategy takes it."
        )


def check_optimizers(trainer: pl.Trainer, accumulates: bool) -> None:
    """Raise :class:`MisconfigurationException` for LBFGS that accumulates, or that has a gradient scaler."""
    if not any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        return
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise MisconfigurationException(
            f"LBFGS does not work with precision {trainer.precision!r}: it evaluates the loss several times per step, "
            "and the gradient scaler expects one. Use 'bf16-mixed' or '32-true', or another optimizer."
        )
    if accumulates:
        refuse_repeats(trainer)


def refuse_repeats(trainer: pl.Trainer) -> None:
    """Raise for an optimizer that evaluates its closure several times, with a factor above 1."""
    raise MisconfigurationException(
        f"AccumulationScheduler does not work with {type(trainer.optimizers[0]).__name__}, which evaluates the "
        "last micro-batch of a window several times. Use another optimizer, or a schedule of 1."
    )
