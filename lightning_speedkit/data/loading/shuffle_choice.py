"""Chooses the order of an epoch: a shuffle of all samples or one by blocks, from the size of store and memory."""

from __future__ import annotations

import logging
from typing import Any

from lightning_speedkit.data.argument_checks import a_type, check_choice, checked_integer
from lightning_speedkit.data.loading.epoch_order import REMAINDERS, EpochOrder
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.measure import read_hardware

__all__ = ["choose_order", "choose_shuffle", "is_store"]

_logger = logging.getLogger(__name__)
_SHARE_OF_RAM = 0.5  # a store above it is read in block order
_WINDOW_BYTES = 1 << 30  # of a window of blocks; a constant, since hosts of unlike memory must agree on the order
_LARGEST_PERMUTATION = 1 << 24


def is_store(dataset: Any) -> bool:
    """Whether the samples of a dataset are those of a store, by the same numbers; a subclass may have others.

    >>> is_store([1, 2, 3])
    False
    """
    return isinstance(dataset, LMDBDataset) and type(dataset).__len__ is LMDBDataset.__len__


def choose_order(
    dataset: Any,
    shuffle: bool | str,
    *,
    batch_size: int,
    seed: int,
    drop_last: bool,
    remainder: str,
    rank: int,
    world_size: int,
) -> tuple[EpochOrder, bool]:
    """The order of :class:`~lightning_speedkit.data.RingLoader`, and whether the data stays in memory once it was read.

    >>> order, fits = choose_order(
    ...     "abcd", False, batch_size=2, seed=0, drop_last=False, remainder="pad", rank=0, world_size=1
    ... )
    >>> order.samples, fits
    (4, True)
    """
    check_choice("remainder", remainder, REMAINDERS)
    if not len(dataset):
        raise ValueError(f"{type(dataset).__name__} has no samples.")
    kind, fits, extra = choose_shuffle(dataset, shuffle)
    order = EpochOrder(
        samples=len(dataset),
        batch_size=batch_size,
        shuffle=kind,
        seed=checked_integer("seed", seed, 0),
        drop_last=drop_last,
        remainder=remainder,
        rank=checked_integer("rank", rank, 0),
        world_size=checked_integer("world_size", world_size, 1),
        **extra,
    )
    if order.rank >= order.world_size:
        raise ValueError(f"rank must be below world_size={world_size}, got {rank}.")
    return order, fits


def choose_shuffle(dataset: Any, shuffle: bool | str) -> tuple[str, bool, dict[str, Any]]:
    """The order's kind, whether the data stays in memory once it was read, and what else ``EpochOrder`` needs to know.

    >>> choose_shuffle([1, 2, 3], True)
    ('full', True, {})
    """
    allowed = (False, True, "full", "blocks")
    if not any(shuffle is value or (isinstance(value, str) and shuffle == value) for value in allowed):
        raise ValueError(f"shuffle must be False, True, 'full' or 'blocks', got {shuffle!r}.")
    if not is_store(dataset):
        if shuffle == "blocks":
            own = " with a length of its own" if isinstance(dataset, LMDBDataset) else ""
            raise ValueError(f"shuffle='blocks' needs an LMDBDataset, got {a_type(dataset)}{own}; use 'full'.")
        return ("full" if shuffle else "none"), True, {}
    size, memory = dataset.path.stat().st_size, read_hardware("cpu").memory_bytes
    fits = not memory or size <= _SHARE_OF_RAM * memory
    if shuffle is True:
        shuffle = "full" if fits and len(dataset) <= _LARGEST_PERMUTATION else "blocks"
        _logger.info(
            "%s (%.1f GiB, %d samples; %.1f GiB of memory) is shuffled %s.", dataset.path.name, size / 2**30,
            len(dataset), memory / 2**30, "in full" if shuffle == "full" else "by blocks",
        )  # fmt: skip
    if shuffle != "blocks":
        return (shuffle or "none"), fits, {}
    firsts = dataset.block_firsts()
    window = _WINDOW_BYTES * len(firsts) // size
    return shuffle, fits, {"block_firsts": firsts, "window_blocks": max(window, 1)}
