"""The loaders of a DataModule, made with its settings and for the ranks and the device of its Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler

from lightning_speedkit.data.device.device_prefetch import DevicePrefetcher
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.loader import RingLoader
from lightning_speedkit.data.loading.shuffle_choice import choose_shuffle
from lightning_speedkit.measure.lightning_loaders import epochs_done, recount_batches

if TYPE_CHECKING:
    from lightning_speedkit.data.datamodule import SpeedkitDataModule

__all__ = ["LoaderOfSplit", "NoSuchSplit", "on_device", "ring_loader", "shards", "skip_or_recount", "torch_loader"]


class LoaderOfSplit(RingLoader):
    """A loader that knows which split it serves."""

    split = ""


class NoSuchSplit(list[Any]):
    """The loader of a split that is not there: no batches, so Lightning skips that part of a fit, and says so once."""


def ring_loader(
    data: SpeedkitDataModule, split: str, dataset: Any, *, shuffle: bool | str, remainder: str
) -> LoaderOfSplit:
    """The kit's own loader; one of the same split that nobody iterates is closed."""
    loaders = data._loaders
    for before in [loader for loader in loaders if loader.split == split and not loader.is_iterated]:
        before.close()
        loaders.remove(before)
    ranks = shards(data)
    if shuffle is True and ranks["num_replicas"] > 1 and data.trainer is not None:
        # Hosts may have unlike memory, and all ranks must take the same order.
        shuffle = data.trainer.strategy.broadcast(choose_shuffle(dataset, True)[0])
    loader = LoaderOfSplit(
        dataset,
        batch_size=data.batch_size,
        shuffle=shuffle,
        seed=data.seed,
        drop_last=split == "train" and data.drop_last,
        remainder=remainder,
        rank=ranks["rank"],
        world_size=ranks["num_replicas"],
        workers=data.loader,
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        collate=data._collate_fn(),
        pin_memory=_pins(data),
        start_method=data.start_method,
    )
    loader.split = split
    loaders.append(loader)
    return loader


def torch_loader(
    data: SpeedkitDataModule,
    dataset: Any,
    *,
    sampler: DistributedSampler[Any] | None = None,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """torch's DataLoader."""
    workers = data.num_workers or 0
    return DataLoader(
        dataset,
        batch_size=data.batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=data._collate_fn(),
        pin_memory=_pins(data),
        drop_last=drop_last,
        generator=_random_numbers(data),
        persistent_workers=workers > 0,
        prefetch_factor=data.prefetch_factor if workers > 0 else None,
        multiprocessing_context=data.start_method if workers > 0 else None,
    )


def on_device(data: SpeedkitDataModule, loader: RingLoader) -> Any:
    """The loader as the Trainer gets it: its batches are on a CUDA device, fetched ahead."""
    device = None if data.trainer is None else data.trainer.strategy.root_device
    if device is None or device.type != "cuda" or _touches_transfer(data):
        return loader
    return DevicePrefetcher(loader, device)


def shards(data: SpeedkitDataModule) -> dict[str, Any]:
    """How many ranks there are, and which one this is, as a ``DistributedSampler`` takes it."""
    return getattr(data.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}


def skip_or_recount(data: SpeedkitDataModule, state: dict[str, Any]) -> None:
    """For a training loader that goes on within an epoch, the Trainer's count of the batches that are done.

    Of an epoch that the Trainer counts as done, the other samples are skipped, with a warning.
    """
    trainer = data.trainer
    assert trainer is not None
    epoch, position, samples = (state[name] for name in ("epoch", "position", "samples"))
    if not 0 < position < samples:
        return
    done = epochs_done(trainer)
    if done is not None and done > epoch:
        if trainer.limit_train_batches == 1.0 and not getattr(trainer, "overfit_batches", 0):
            rank_zero_warn(
                f"The checkpoint was saved after {position} of the {samples} samples of epoch {epoch}, and counts "
                f"that epoch as done, as Lightning does when max_steps, max_time or should_stop ends a run: the "
                f"other samples are skipped. To go on with them, resume from a checkpoint that was saved within "
                f"the epoch, such as one of ModelCheckpoint(every_n_train_steps=...)."
            )
        return
    # The Trainer counts the batches of the unfinished epoch; another number of ranks makes another count of it.
    order = EpochOrder(
        samples=samples,
        batch_size=data.batch_size,
        drop_last=data.drop_last,
        remainder=data.remainder,
        world_size=shards(data)["num_replicas"],
    )
    recount_batches(trainer, order.steps() - order.steps(position))


def _pins(data: SpeedkitDataModule) -> bool:
    if data.pin_memory is not None:
        return data.pin_memory
    return data.trainer is not None and data.trainer.strategy.root_device.type == "cuda"


def _touches_transfer(data: SpeedkitDataModule) -> bool:
    """Whether somebody wants to see batches on their way to the device."""
    module = None if data.trainer is None else data.trainer.lightning_module
    return any(
        owner is not None and is_overridden(hook, owner, kind)
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device")
        for owner, kind in ((data, LightningDataModule), (module, LightningModule))
    )


def _random_numbers(data: SpeedkitDataModule) -> torch.Generator:
    """Where a loader draws its workers' seeds from, and not from the global random state.

    With the epoch in it, a resumed run and a loader made anew do not begin with the numbers of the first epoch.
    """
    epoch = 0 if data.trainer is None else data.trainer.current_epoch
    words = np.random.SeedSequence([data.seed, shards(data)["rank"], epoch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
