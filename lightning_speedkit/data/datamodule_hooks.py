"""What a DataModule hands out of itself: ``collate`` to workers, and its transform of whole batches to the Trainer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule

from lightning_speedkit.data.device.batch_random import training_seed
from lightning_speedkit.data.device.device_transform import DeviceTransform

if TYPE_CHECKING:
    from lightning_speedkit.data.datamodule import SpeedkitDataModule

__all__ = ["CollateOfDataModule", "TransformOnDevice"]


class CollateOfDataModule:
    """A DataModule's ``collate``; spawned workers get it without the Trainer, which leads to the model and all else."""

    def __init__(self, data: SpeedkitDataModule) -> None:
        self._data = data

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self._data.collate(samples)

    def __getstate__(self) -> dict[str, Any]:
        alone = copy.copy(self._data)
        alone.trainer = None
        alone._loaders, alone._training = [], None
        alone.__dict__.pop("on_after_batch_transfer", None)
        return {"_data": alone}


class TransformOnDevice:
    """The hook ``on_after_batch_transfer``: the transform, then what the DataModule's class or the module has there."""

    def __init__(self, data: SpeedkitDataModule, transform: DeviceTransform) -> None:
        self._data = data
        self._transform = transform
        self.__code__ = type(self).__call__.__code__  # by which Lightning knows whether a hook is overridden

    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        trainer = self._data.trainer
        if trainer is None:
            return batch
        batch = self._transform(batch, training=trainer.training, seed=training_seed(trainer, self._data.seed))
        own = type(self._data).on_after_batch_transfer
        if own is not LightningDataModule.on_after_batch_transfer:
            return own(self._data, batch, dataloader_idx)
        return trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx)
