"""A LightningDataModule that needs one method: ``dataset(split)``.

It serves all four splits by :class:`RingLoader`, or by torch's DataLoader on request, with the settings that usually
matter for speed. Shuffling depends on seed and epoch alone: the order does not depend on the global random state, is
not changed by it, and does not change it. In distributed training each rank reads its own part of one global order,
whatever the Trainer's ``use_distributed_sampler`` says; in evaluation every sample is read exactly once. With
``loader="torch"`` validation and test are divided by Lightning's own sampler, which repeats a few.

A run that is resumed from a checkpoint in the middle of an epoch goes on with exactly the samples that are left, also
with another number of ranks. The position is saved with the DataModule, since what Lightning keeps of a loader is lost
if ``trainer.estimated_stepping_batches`` is read before training.

On a CUDA device the next batch is copied while the current one computes, and
:meth:`SpeedkitDataModule.device_transform` augments whole batches there.

Source: Lightning #20550 (state of loaders), #20249 (the same order in each run), #2857 (shuffling is forced on a
distributed sampler), #10469 (augmentation on the device); pytorch/pytorch#62066 (persistent workers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_speedkit.data.argument_checks import a_type, check_choice, checked_integer
from lightning_speedkit.data.datamodule_hooks import CollateOfDataModule, TransformOnDevice
from lightning_speedkit.data.datamodule_loaders import (
    LoaderOfSplit,
    NoSuchSplit,
    on_device,
    ring_loader,
    shards,
    skip_or_recount,
    torch_loader,
)
from lightning_speedkit.data.device.device_prefetch import DevicePrefetcher
from lightning_speedkit.data.device.device_transform import DeviceTransform
from lightning_speedkit.data.loading.collate import collate_samples
from lightning_speedkit.data.loading.loader import RingLoader
from lightning_speedkit.data.loading.worker_choice import START_METHODS, WORKERS

__all__ = ["LOADERS", "SPLITS", "SPLIT_OF_STAGE", "SpeedkitDataModule"]

LOADERS = (*WORKERS, "torch")
SPLITS = ("train", "val", "test", "predict")
SPLIT_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class SpeedkitDataModule(LightningDataModule):
    """Loaders for the datasets that a subclass gives; override :meth:`dataset`.

    Args:
        batch_size: samples per batch and rank.
        loader: who makes the batches: ``"auto"`` (measured for a moment, see :class:`RingLoader`), ``"threads"``,
            ``"processes"``, ``"inline"``, or ``"torch"`` for torch's DataLoader.
        num_workers: threads or processes; by default as many as :class:`RingLoader` takes, with ``"torch"`` none. 0
            loads in the training process.
        pin_memory: page-locked batches, which copy faster to a GPU; by default on when the Trainer uses CUDA.
        prefetch_factor: batches that each worker keeps ready.
        shuffle: a new order of the training samples in each epoch: ``True``, ``"full"``, ``"blocks"`` or ``False``; the
            other splits are never shuffled.
        drop_last: leave out a last training batch that is smaller than the others.
        remainder: training samples that do not divide by the ranks: ``"pad"`` repeats some, ``"drop"`` leaves some out.
        seed: of the order and of the random numbers of transforms.
        start_method: of worker processes, ``"fork"``, ``"forkserver"`` or ``"spawn"``; Python's own choice by default.

    Example::

        >>> class Squares(SpeedkitDataModule):
        ...     def dataset(self, split):
        ...         return [(i, i * i) for i in range(5)] if split == "train" else None
        >>> data = Squares(batch_size=4, shuffle=False)
        >>> next(iter(data.train_dataloader()))
        (tensor([0, 1, 2, 3]), tensor([0, 1, 4, 9]))
        >>> data.val_dataloader()
        []
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        loader: str = "auto",
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        shuffle: bool | str = True,
        drop_last: bool = False,
        remainder: str = "pad",
        seed: int = 0,
        start_method: str | None = None,
    ) -> None:
        super().__init__()
        if num_workers == 0 and loader in ("threads", "processes"):
            raise ValueError(f"loader={loader!r} needs num_workers of 1 or more, or None; 0 means loader='inline'.")
        if shuffle == "blocks" and loader == "torch":
            raise ValueError("shuffle='blocks' is not for loader='torch'; use shuffle=True.")
        check_choice("loader", loader, LOADERS)
        check_choice("remainder", remainder, ("pad", "drop"))
        check_choice("shuffle", shuffle, (True, False, "full", "blocks"))
        check_choice("drop_last", drop_last, (True, False))
        check_choice("pin_memory", pin_memory, (True, False, None))
        check_choice("start_method", start_method, START_METHODS)
        self.batch_size = checked_integer("batch_size", batch_size, 1, bits=32)
        self.loader = loader
        self.num_workers = None if num_workers is None else checked_integer("num_workers", num_workers, 0, bits=32)
        self.pin_memory = pin_memory
        self.prefetch_factor = checked_integer("prefetch_factor", prefetch_factor, 1, bits=32)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.remainder = remainder
        self.seed = checked_integer("seed", seed, 0, bits=32)
        self.start_method = start_method
        self._loaders: list[LoaderOfSplit] = []
        self._training: Any = None  # the training loader as the Trainer has it
        self._position: dict[str, Any] | None = None  # of the training loader, from a checkpoint

    def dataset(self, split: str) -> Dataset[Any] | Sequence[Any] | None:
        """The map-style dataset of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``; ``None`` if there is none."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset(split).")

    def collate(self, samples: Sequence[Any]) -> Any:
        """A list of samples as one batch; by default :func:`~lightning_speedkit.data.collate_samples`."""
        return collate_samples(samples)

    def device_transform(self) -> DeviceTransform | None:
        """What is done to whole batches on the device, before the module's own ``on_after_batch_transfer``."""
        return None

    @override
    def train_dataloader(self) -> Any:
        dataset = self._served("train")
        if dataset is None:
            raise MisconfigurationException(self._missing("train"))
        shuffle = self.shuffle
        if shuffle and self.trainer is not None and getattr(self.trainer, "overfit_batches", 0) > 0:
            rank_zero_info("overfit_batches: the training samples are not shuffled.")
            shuffle = False
        if self.loader == "torch":
            self._training = None
            # Also for one rank: Lightning calls its set_epoch, and it is the one sampler that Lightning leaves alone.
            sampler: DistributedSampler[Any] = DistributedSampler(
                dataset, shuffle=bool(shuffle), seed=self.seed, drop_last=self.remainder == "drop", **shards(self)
            )
            return torch_loader(self, dataset, sampler=sampler, drop_last=self.drop_last)
        loader = ring_loader(self, "train", dataset, shuffle=shuffle, remainder=self.remainder)
        if self._position is not None:
            position, self._position = self._position, None
            loader.load_state_dict(position)
        self._training = on_device(self, loader)
        return self._training

    @override
    def val_dataloader(self) -> Any:
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> Any:
        return self._evaluation_loader("test")

    @override
    def predict_dataloader(self) -> Any:
        return self._evaluation_loader("predict")

    @override
    def state_dict(self) -> dict[str, Any]:
        # Of what the Trainer has got: batches that were fetched ahead for the device do not count.
        held = getattr(self.trainer, "train_dataloader", None)
        loader = held if isinstance(held, RingLoader | DevicePrefetcher) else self._training
        return {} if loader is None else {"train": loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fits = self.trainer is None or self.trainer.state.fn == "fit"  # an evaluation leaves the next fit alone
        self._position = state_dict.get("train") if fits and self.loader != "torch" else None
        if self._position is not None and self.trainer is not None:
            skip_or_recount(self, self._position)

    @override
    def teardown(self, stage: str) -> None:
        """End the workers."""
        self._end_workers()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the workers: the Trainer does not reach ``teardown``."""
        self._end_workers()

    def _end_workers(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._position = None  # also if a run failed before it asked for the loader: the next one begins anew

    def _evaluation_loader(self, split: str) -> Any:
        dataset = self._served(split)
        if dataset is not None:
            # A writer wants the indices of each batch, which Lightning finds in its own sampler only.
            if self.loader == "torch" or (split == "predict" and self._has_writer()):
                return torch_loader(self, dataset)
            return on_device(self, ring_loader(self, split, dataset, shuffle=False, remainder="exact"))
        stage = None if self.trainer is None else self.trainer.state.fn
        if stage is not None and SPLIT_OF_STAGE.get(stage.value) == split:
            raise MisconfigurationException(self._missing(split))
        return NoSuchSplit()

    def _has_writer(self) -> bool:
        callbacks = getattr(self.trainer, "callbacks", ())
        return any(isinstance(callback, BasePredictionWriter) for callback in callbacks)

    def _hook_transform(self) -> None:
        """Take the hook only if there is a transform: a hook of the DataModule takes the place of the module's."""
        transform = self.device_transform()
        if transform is not None and not isinstance(transform, DeviceTransform):
            raise TypeError(
                f"device_transform() of {type(self).__name__} must return a DeviceTransform or None, got "
                f"{transform!r}: DeviceTransform(train=[...], always=[...]) takes operations and modules."
            )
        if transform is None:
            self.__dict__.pop("on_after_batch_transfer", None)
        else:
            self.on_after_batch_transfer = TransformOnDevice(self, transform)  # type: ignore[method-assign]

    def _served(self, split: str) -> Any:
        """The dataset of a split, or ``None``; a ``TypeError`` for what a sampler cannot index."""
        self._hook_transform()
        dataset = self.dataset(split)
        indexed = all(hasattr(type(dataset), name) for name in ("__len__", "__getitem__"))
        if dataset is None or (indexed and not isinstance(dataset, IterableDataset)):
            return dataset
        raise TypeError(
            f"dataset({split!r}) of {type(self).__name__} returned {a_type(dataset)}: it must be a map-style "
            f"dataset, with __len__ and __getitem__. Give a loader or an IterableDataset to the Trainer itself."
        )

    def _collate_fn(self) -> Callable[[Sequence[Any]], Any]:
        plain = getattr(self.collate, "__func__", None) is SpeedkitDataModule.collate
        return collate_samples if plain else CollateOfDataModule(self)

    def _missing(self, split: str) -> str:
        return f"{type(self).__name__} has no dataset for the split {split!r}: dataset({split!r}) returned None."
