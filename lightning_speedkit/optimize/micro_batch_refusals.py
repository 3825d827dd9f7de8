"""What :class:`~lightning_speedkit.optimize.AutoMicroBatch` does not work with, and what to do instead."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm

__all__ = ["check_strategy", "check_trainer", "check_wrapped"]


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, kind: type[Callback]) -> None:
    """Raise if this Trainer and module cannot run a batch again.

    Raises:
        MisconfigurationException: They cannot; the message names the way out.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"AutoMicroBatch works with automatic optimization, and {name} sets automatic_optimization = False. Remove "
            "the callback, and call backward_in_pieces of lightning_speedkit.optimize in your training_step."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"AutoMicroBatch runs a batch again, and {name}.training_step takes the dataloader_iter. Let it take "
            "(batch, batch_idx), or remove the callback."
        )
    others = [c for c in trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]
    if len(others) > 1:
        raise MisconfigurationException("There are two AutoMicroBatch callbacks. Keep one of them.")
    check_strategy(trainer)


def check_strategy(trainer: pl.Trainer) -> None:
    """Raise if ranks would wait for each other inside the passes of this strategy, in training and evaluation.

    Raises:
        MisconfigurationException: They would; the message names the ones that work.
    """
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"AutoMicroBatch does not work with {type(trainer.strategy).__name__}, whose forward and backward passes "
            "wait for other ranks: it supports one device and DDP. Remove the callback."
        )


def check_wrapped(model: Any) -> None:
    """Raise if ranks would wait for each other inside a forward or backward pass of a wrapped model.

    Raises:
        MisconfigurationException: They would; the message names the way out.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        raise MisconfigurationException(
            "AutoMicroBatch does not work with static_graph=True: torch synchronises inside the first backward pass, "
            "where a rank without memory would leave the others waiting. Use strategy='ddp' or 'speedkit_ddp'."
        )
    if holds_sync_batch_norm(model):
        raise MisconfigurationException(
            "AutoMicroBatch does not work with SyncBatchNorm: ranks wait for each other inside its forward pass, and a "
            "rank without memory would leave the others waiting. Set Trainer(sync_batchnorm=False), or use GroupNorm."
        )
