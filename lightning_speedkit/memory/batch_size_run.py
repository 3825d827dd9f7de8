"""The surroundings of trials of batch sizes in a Trainer's run: what refuses them, what is kept, what is turned off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_speedkit.measure.kept_state import GENERATORS, KeptState
from lightning_speedkit.measure.out_of_memory import release_memory
from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.memory.batch_size_ranks import Ranks

__all__ = ["refuse", "trials"]


def refuse(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if batch sizes cannot be tried in this run.

    Raises:
        MisconfigurationException: They cannot; the message names the way out.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"BatchSizeSearch hands over the batches, and {type(module).__name__}.training_step takes the "
            "dataloader_iter. Let it take (batch, batch_idx), or remove the callback."
        )
    pieces = [one for one in trainer.callbacks if any(c.__name__ == "AutoMicroBatch" for c in type(one).__mro__)]  # type: ignore[attr-defined]
    if pieces:  # of another area, which this one does not import
        raise MisconfigurationException(
            "BatchSizeSearch beside AutoMicroBatch would find that every size fits, since that computes batches in "
            "pieces. Use one of them."
        )
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"BatchSizeSearch does not work with {type(trainer.strategy).__name__}: it supports one device and DDP. "
            "Find the size there with a smaller model, or remove the callback."
        )
    if trainer.world_size > 1 and holds_sync_batch_norm(module):
        raise MisconfigurationException(
            "BatchSizeSearch does not work with SyncBatchNorm: ranks wait for each other inside its forward pass, and "
            "a rank without memory would leave the others waiting. Search with Trainer(sync_batchnorm=False)."
        )


@contextmanager
def trials(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[KeptState, Ranks]]:
    """Keep what a trial changes, and turn off what would tell of it or make ranks wait for each other."""
    with ExitStack() as stack:
        ranks = Ranks(trainer.world_size)
        stack.callback(ranks.close)
        stack.callback(release_memory, trainer.strategy.root_device)
        for owner, name, value in (
            (trainer, "callbacks", []),
            (trainer, "loggers", [DummyLogger() for _ in trainer.loggers]),
            (trainer.strategy, "model", module),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for name in ("log", "log_dict"):  # outside of Lightning's loops they raise
            setattr(module, name, lambda *_, **__: None)
            stack.callback(delattr, module, name)
        kept = KeptState()
        stack.callback(kept.finish)
        _keep_run(kept, trainer, module)
        stack.enter_context(torch.enable_grad())
        yield kept, ranks


def _keep_run(kept: KeptState, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    kept.random_states()
    kept.module(module)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    for owner in (*trainer.optimizers, *schedulers, trainer.precision_plugin, scaler):
        if owner is not None:
            kept.attributes(owner)
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        kept.attributes(data, contents=GENERATORS)  # the rest may be all of the data
