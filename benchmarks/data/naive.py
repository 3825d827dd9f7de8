"""What a competent person writes without a library for loading: LMDB with a pickle per sample, and one file per sample.

The LMDB variant is the pattern of the tutorials with its faults mended: the environment is opened in each worker and
not before a fork, without lock, with the read-ahead of the map as usual for random order off, keys of fixed length,
written in order. A picture is decoded with Pillow and resized to 224.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.data.datasets import SIZE, Data
from benchmarks.data.measuring import Batches

__all__ = ["epochs_of", "files", "lmdb", "picture", "write_pickles"]


@contextmanager
def lmdb(data: Data, workers: int) -> Iterator[Batches]:
    """A pickle per sample in LMDB."""
    yield epochs_of(_Pickles(data.made("pickles.lmdb", write_pickles), data.samples), data, workers)


@contextmanager
def files(data: Data, workers: int) -> Iterator[Batches]:
    """A ``.npy`` or ``.jpg`` file per sample in one folder."""
    yield epochs_of(_Files(data.made("files", _write_files), data), data, workers)


def epochs_of(dataset: Dataset[Any], data: Data, workers: int) -> Batches:
    """Torch's DataLoader, shuffled, with workers that live as long as the loader."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=data.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda _number: loader


def picture(jpeg: bytes) -> torch.Tensor:
    """A JPEG file as uint8 (3, 224, 224), by Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(jpeg)) as image:
        array = np.array(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def write_pickles(data: Data, path: Path) -> None:
    """The store: ``key -> pickle((x, y))``."""
    import lmdb as engine

    size = data.samples * (data.bytes_per_sample + 8192) + (64 << 20)
    with engine.open(str(path), map_size=size, subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            for number, pair in enumerate(data.pairs()):
                transaction.put(f"{number:08d}".encode(), pickle.dumps(pair, protocol=pickle.HIGHEST_PROTOCOL))
        environment.sync(True)


class _Pickles(Dataset[Any]):
    def __init__(self, path: Path, samples: int) -> None:
        self.path = str(path)
        self.samples = samples
        self._environment: Any = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._environment is None:
            import lmdb as engine

            self._environment = engine.open(
                self.path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False
            )
        with self._environment.begin() as transaction:
            x, y = pickle.loads(transaction.get(f"{index:08d}".encode()))  # noqa: S301 - written by this benchmark
        return (picture(x) if isinstance(x, bytes) else torch.from_numpy(x)), y


class _Files(Dataset[Any]):
    def __init__(self, folder: Path, data: Data) -> None:
        self.folder = folder
        self.data = data

    def __len__(self) -> int:
        return self.data.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = self.data.label(index)
        if self.data.encoded:
            return picture((self.folder / f"{index:08d}.jpg").read_bytes()), label
        return torch.from_numpy(np.load(self.folder / f"{index:08d}.npy")), label


def _write_files(data: Data, folder: Path) -> None:
    folder.mkdir()
    for number, (x, _) in enumerate(data.pairs()):
        if isinstance(x, bytes):
            (folder / f"{number:08d}.jpg").write_bytes(x)
        else:
            np.save(folder / f"{number:08d}.npy", x)
