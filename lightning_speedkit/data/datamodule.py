"""A LightningDataModule that needs one method: ``dataset(split)``.

It builds the DataLoaders of all four splits with the settings that usually matter for speed (workers kept alive,
pinned memory where there is a CUDA device, prefetching), keeps tuples as tuples in a batch, and shuffles by seed and
epoch alone: the order does not depend on the global random state, is not changed by it, does not change it, and is the
same again after a resume. In distributed training each rank reads its own part of one global order, whatever the
Trainer's ``use_distributed_sampler`` says; evaluation is left to the sampler that Lightning puts in.

What to know: workers pay off when a sample takes Python work (decoding, augmentation). For plain tensors they can be
slower than none, because a batch has to travel between processes.

Source: Lightning #20249 (the same order in each run), #2857 (shuffling is forced on a distributed sampler),
pytorch/pytorch#62066 (persistent workers).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_speedkit.data.collate import collate_samples

__all__ = ["SPLITS", "SPLIT_OF_STAGE", "SpeedkitDataModule"]

SPLITS = ("train", "val", "test", "predict")
SPLIT_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class NoSuchSplit(list[Any]):
    """The loader of a split that is not there: no batches, so Lightning skips that part of a fit, and says so once."""


class _Collate:
    """A DataModule's ``collate``; spawned workers get it without the Trainer, which leads to the model and all else."""

    def __init__(self, data: SpeedkitDataModule) -> None:
        self._data = data

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self._data.collate(samples)

    def __getstate__(self) -> dict[str, Any]:
        alone = copy.copy(self._data)
        alone.trainer = None
        return {"_data": alone}


class SpeedkitDataModule(LightningDataModule):
    """DataLoaders for the datasets that a subclass gives; override :meth:`dataset`.

    Args:
        batch_size: samples per batch and rank.
        num_workers: processes that load samples; 0 loads in the training process.
        pin_memory: page-locked batches, which copy faster to a GPU; by default on when the Trainer uses CUDA.
        prefetch_factor: batches that each worker keeps ready.
        shuffle: a new order of the training samples in each epoch; the other splits are never shuffled.
        drop_last: leave out a last training batch that is smaller than the others.
        seed: of the order and of the workers' random numbers.

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
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
            ("seed", seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}.")
            if not least <= value < 2**32:
                raise ValueError(f"{name} must be at least {least} and below 2**32, got {value}.")
        for name, switch in (("shuffle", shuffle), ("drop_last", drop_last), ("pin_memory", pin_memory)):
            if not isinstance(switch, bool) and (switch is not None or name != "pin_memory"):
                allowed = "True, False or None" if name == "pin_memory" else "True or False"
                raise TypeError(f"{name} must be {allowed}, got {switch!r}.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed

    def dataset(self, split: str) -> Dataset[Any] | Sequence[Any] | None:
        """The map-style dataset of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``; ``None`` if there is none."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset(split).")

    def collate(self, samples: Sequence[Any]) -> Any:
        """A list of samples as one batch; by default :func:`~lightning_speedkit.data.collate_samples`."""
        return collate_samples(samples)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        dataset = self._served("train")
        if dataset is None:
            raise MisconfigurationException(self._missing("train"))
        # Also for one rank: Lightning calls its set_epoch, and it is the one sampler that Lightning leaves in place.
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, shuffle=self.shuffle, seed=self.seed, **self._shards()
        )
        return self._loader(dataset, sampler=sampler, drop_last=self.drop_last)

    @override
    def val_dataloader(self) -> Any:
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> Any:
        return self._evaluation_loader("test")

    @override
    def predict_dataloader(self) -> Any:
        return self._evaluation_loader("predict")

    def _evaluation_loader(self, split: str) -> Any:
        dataset = self._served(split)
        if dataset is not None:
            return self._loader(dataset)
        stage = None if self.trainer is None else self.trainer.state.fn
        if stage is not None and SPLIT_OF_STAGE.get(stage.value) == split:
            raise MisconfigurationException(self._missing(split))
        return NoSuchSplit()

    def _loader(
        self, dataset: Any, *, sampler: DistributedSampler[Any] | None = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        pin_memory = self.pin_memory
        if pin_memory is None:
            pin_memory = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=self._collate_fn(),
            pin_memory=pin_memory,
            drop_last=drop_last,
            generator=self._random_numbers(),
            persistent_workers=self.num_workers > 0,
            prefetch_factor=self.prefetch_factor if self.num_workers > 0 else None,
        )

    def _collate_fn(self) -> Callable[[Sequence[Any]], Any]:
        plain = getattr(self.collate, "__func__", None) is SpeedkitDataModule.collate
        return collate_samples if plain else _Collate(self)

    def _served(self, split: str) -> Any:
        """The dataset of a split, or ``None``; a ``TypeError`` for what a sampler cannot index."""
        dataset = self.dataset(split)
        indexed = all(hasattr(type(dataset), name) for name in ("__len__", "__getitem__"))
        if dataset is None or (indexed and not isinstance(dataset, IterableDataset)):
            return dataset
        raise TypeError(
            f"dataset({split!r}) of {type(self).__name__} returned a {type(dataset).__name__}: it must be a map-style "
            f"dataset, with __len__ and __getitem__. Give a loader or an IterableDataset to the Trainer itself."
        )

    def _shards(self) -> dict[str, Any]:
        return getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}

    def _random_numbers(self) -> torch.Generator:
        """Where a loader draws its workers' seeds from, and not from the global random state.

        With the epoch in it, a resumed run and a loader made anew do not begin with the numbers of the first epoch.
        """
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        words = np.random.SeedSequence([self.seed, self._shards()["rank"], epoch]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))

    def _missing(self, split: str) -> str:
        return f"{type(self).__name__} has no dataset for the split {split!r}: dataset({split!r}) returned None."
