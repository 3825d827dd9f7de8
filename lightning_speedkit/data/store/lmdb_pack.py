"""Packs any source of samples into a store: an iterable, or a dataset with ``__len__`` and ``__getitem__``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.store.lmdb_writer import LMDBWriter

__all__ = ["iterate_samples", "write_lmdb"]


def write_lmdb(
    samples: Any, path: str | os.PathLike[str], *, block_bytes: int = 1 << 20, progress: bool = False
) -> Path:
    """Write all samples into one file, which appears at ``path`` when it is complete.

    A sample is a tuple, list or dict (nested as you like), or a single value, of tensors, NumPy arrays, int, float,
    bool, str, bytes and ``None``; it is read back with the same structure and types. All samples have the structure
    and the types of the first; the shapes of a field may vary, also from sample to sample. Tensors are stored on the
    CPU and without their gradient; a dict has the key order of the first sample.

    Args:
        samples: an iterable, or a map-style dataset, which is read in the order of its indices.
        path: the file to write; an older store there is replaced at the end, at once.
        block_bytes: how many bytes of samples are stored, checked and read together.
        progress: show a progress bar on the standard error stream.

    Returns:
        The absolute path of the store.

    Raises:
        EmptyStoreError: there were no samples.
        SampleMismatchError: a sample differs from the first in structure or type; it names sample and field.
        StoreWriteError: the disk is full, cannot be written, or another writer is at work on the path.
        TypeError: the first sample holds something that only pickle could restore.

    Example::

        >>> import tempfile, torch
        >>> from lightning_speedkit.data import LMDBDataset, write_lmdb
        >>> folder = tempfile.TemporaryDirectory()
        >>> samples = [{"x": torch.ones(2), "name": "first"}, {"x": torch.ones(3), "name": "second"}]
        >>> path = write_lmdb(samples, f"{folder.name}/a.lmdb")
        >>> LMDBDataset(path)[1]
        {'x': tensor([1., 1., 1.]), 'name': 'second'}
    """
    if isinstance(samples, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise TypeError(f"The samples come first: write_lmdb(samples, path), got {samples!r} and {a_type(path)}.")
    iterator, count = iterate_samples(samples)
    with LMDBWriter(path, block_bytes=block_bytes) as writer:
        for sample in _shown(iterator, count, f"packing {writer.path.name}") if progress else iterator:
            writer.write(sample)
    return writer.path


def iterate_samples(samples: Any) -> tuple[Iterator[Any], int | None]:
    """The samples of an iterable or of a map-style dataset, and how many they are if that is known.

    Raises:
        TypeError: it is neither.

    >>> list(iterate_samples([1, 2])[0]), iterate_samples([1, 2])[1]
    ([1, 2], 2)
    """
    if isinstance(samples, str | bytes | Mapping):
        raise TypeError(f"samples must be an iterable of samples or a dataset, got {a_type(samples)}.")
    try:
        count = len(samples)
    except TypeError:  # no length, or a DataLoader over an IterableDataset, which has no more than the method
        count = None
    if isinstance(samples, Iterable):
        return iter(samples), count
    if count is not None and hasattr(type(samples), "__getitem__"):
        return (samples[i] for i in range(count)), count  # a map-style dataset may not end by IndexError
    raise TypeError(
        f"samples must be an iterable, or have __len__ and __getitem__ as a map-style dataset has; "
        f"{type(samples).__name__} has neither."
    )


def _shown(samples: Iterator[Any], count: int | None, title: str) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        yield from bar.track(samples, total=count, description=title)
