"""Loaders with another batch size: by the ``batch_size`` of who makes them, or made anew."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

__all__ = ["resized", "resized_loader", "samples_at_hand", "set_size_of_owner", "size_of_loaders", "size_of_owner"]

Owner = pl.LightningModule | pl.LightningDataModule | None


def size_of_owner(owner: Owner) -> int | None:
    """The ``batch_size`` of a DataModule or module, its attribute or hyperparameter; ``None`` if it has none.

    >>> data = pl.LightningDataModule()
    >>> data.batch_size = 4
    >>> size_of_owner(data), size_of_owner(pl.LightningDataModule())
    (4, None)
    """
    sizes = [getattr(owner, "batch_size", None), None if owner is None else owner.hparams.get("batch_size")]
    return next((size for size in sizes if isinstance(size, int)), None)


def set_size_of_owner(owner: Owner, size: int) -> None:
    """Set the ``batch_size`` of a DataModule or module, wherever it has one; it is asked for its loaders later."""
    if owner is None:
        return
    if "batch_size" in owner.hparams:
        owner.hparams["batch_size"] = size
    if isinstance(getattr(owner, "batch_size", None), int):
        place = getattr(type(owner), "batch_size", None)
        if not isinstance(place, property) or place.fset is not None:
            setattr(owner, "batch_size", size)  # noqa: B010  # the type knows of no such attribute


def size_of_loaders(loaders: list[Any]) -> int:
    """The one batch size of training loaders.

    Raises:
        MisconfigurationException: They have several, or one has none.
    """
    sizes: list[Any] = [getattr(loader, "batch_size", None) for loader in loaders]
    for loader, size in zip(loaders, sizes, strict=True):
        if not isinstance(size, int):
            given = isinstance(loader, DataLoader)
            reason = "its batch_size is None" if given else "it has no batch_size (of a list, each entry is a loader)"
            raise MisconfigurationException(_no_other_size(loader, reason))
    if len(set(sizes)) > 1:
        raise MisconfigurationException(
            f"BatchSizeSearch finds one batch size, and the training loaders have {sizes}. Give them the same one, or "
            "remove the callback."
        )
    return int(sizes[0])


def samples_at_hand(loaders: list[Any], world_size: int) -> int | None:
    """How many samples each rank has in the shortest of its loaders; ``None`` if no loader says."""
    found = [_length(loader, world_size) for loader in loaders]
    return min((length for length in found if length is not None), default=None)


def _length(loader: Any, world_size: int) -> int | None:
    dataset = getattr(loader, "dataset", None)
    try:
        if isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset):
            return len(loader.sampler)  # type: ignore[arg-type]  # that of this rank
        return max(1, len(dataset) // world_size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def resized(given: Any, size: int) -> Any:
    """Loaders, in the structure in which they came, with batches of this size; those that have it are left as they are.

    >>> [len(batch) for batch in resized({"a": DataLoader(range(10), 2)}, 5)["a"]]
    [5, 5]
    """
    combined = copy.copy(given) if isinstance(given, CombinedLoader) else CombinedLoader(given)
    combined.flattened = [resized_loader(loader, size) for loader in combined.flattened]
    return combined if isinstance(given, CombinedLoader) else combined.iterables


def resized_loader(loader: Any, size: int) -> Any:
    """A DataLoader that differs in its batch size only, or the loader itself if that is its size already.

    Raises:
        MisconfigurationException: It cannot be made anew; the message says why and what to do.
    """
    if getattr(loader, "batch_size", None) == size:
        return loader
    if reason := _why_not(loader):
        raise MisconfigurationException(_no_other_size(loader, reason))
    with_workers = loader.num_workers > 0
    places = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    new = type(loader)(
        loader.dataset,
        batch_size=size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if with_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if with_workers else None,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        **places,
    )
    for name, value in vars(loader).items():  # what a subclass or the user has set on it
        if not name.startswith("_") and name not in vars(new):
            setattr(new, name, value)
    return new


def _why_not(loader: Any) -> str:
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return "it is no DataLoader of torch"
    if any("__init__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(DataLoader)]):
        return "it has a constructor of its own"
    if loader.batch_sampler is None:
        return "its dataset makes the batches (batch_size=None)"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its {type(loader.batch_sampler).__name__} makes the batches"
    return ""


def _no_other_size(loader: Any, reason: str) -> str:
    return (
        f"BatchSizeSearch cannot give the {type(loader).__name__} another batch size: {reason}. Give a plain "
        "DataLoader, or a DataModule with an attribute batch_size that its train_dataloader() uses."
    )
