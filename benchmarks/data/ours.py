"""The kit's loader over its own store: with threads, with processes, and in the loop that asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.data.datasets import SIZE, Data
from benchmarks.data.measuring import Batches
from lightning_speedkit.data import LMDBDataset, RingLoader, write_lmdb

__all__ = ["inline", "loader_of", "processes", "store", "threads"]


@contextmanager
def threads(data: Data, workers: int) -> Iterator[Batches]:
    """Threads, which is what the loader chooses for a plain store."""
    with _epochs(loader_of(data, "threads", workers)) as epoch:
        yield epoch


@contextmanager
def processes(data: Data, workers: int) -> Iterator[Batches]:
    """Processes that write into one shared ring."""
    with _epochs(loader_of(data, "processes", workers)) as epoch:
        yield epoch


@contextmanager
def inline(data: Data, _workers: int) -> Iterator[Batches]:
    """No worker, whatever their number."""
    with _epochs(loader_of(data, "inline", 0)) as epoch:
        yield epoch


def loader_of(data: Data, kind: str, workers: int) -> RingLoader:
    """Shuffled, everything else as it comes."""
    fields = None
    if data.encoded:
        from lightning_speedkit.data.images.image_field import ImageField

        fields = {0: ImageField(SIZE)}
    dataset = LMDBDataset(store(data), fields=fields)
    return RingLoader(dataset, batch_size=data.batch, shuffle=True, workers=kind, num_workers=workers)


def store(data: Data) -> Path:
    """The samples as the kit keeps them."""
    return data.made("speedkit.lmdb", _write)


@contextmanager
def _epochs(loader: RingLoader) -> Iterator[Batches]:
    def epoch(number: int) -> RingLoader:
        loader.set_epoch(number)
        return loader

    try:
        yield epoch
    finally:
        loader.close()


def _write(data: Data, path: Path) -> None:
    import torch

    write_lmdb(((x if isinstance(x, bytes) else torch.from_numpy(x), y) for x, y in data.pairs()), path)
