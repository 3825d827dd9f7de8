"""A map-style dataset over a store, for torch's DataLoader with any number of workers and any start method.

When it helps: random access to many samples without one file per sample, and without the crashes that an LMDB
environment in a Dataset usually brings: only the path is pickled, each process opens the file for itself, and a file
that is short or damaged raises an error instead of ending the process.

What it costs: the checksum of a block is computed when a process touches it first (the ``crc32`` of the block), and
the whole block is read from disk at that time.

Source: pytorch/vision#689, pytorch/examples#526, py-lmdb#346 and #491.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lightning_speedkit.data.lmdb_format import open_for_reading, read_seal
from lightning_speedkit.data.lmdb_store import OpenStore, open_store, table_lock
from lightning_speedkit.errors import StoreCorruptError

__all__ = ["LMDBDataset"]


class LMDBDataset(Dataset[Any]):
    """The samples of a store by their number, each with the structure and types that were written.

    It can be pickled and can be used before and after a fork. The store of the constructor is the one that is read: a
    process that finds another one at the path (written anew meanwhile) raises instead of mixing the two.

    Args:
        path: a file that :func:`write_lmdb` or :class:`LMDBWriter` has written.
        transform: called with each sample; what it returns is handed out. It must be picklable if workers are spawned.

    Raises:
        StoreNotFoundError: there is no file at that path.
        StoreCorruptError: empty, truncated, not a store, or damaged; for a damaged block, when it is read first; when
            it is read, also if the file was replaced or changed in place.
        StoreVersionError: written in a newer format.

    Example::

        >>> import tempfile
        >>> from lightning_speedkit.data import LMDBDataset, write_lmdb
        >>> folder = tempfile.TemporaryDirectory()
        >>> dataset = LMDBDataset(write_lmdb([(i, str(i)) for i in range(10)], f"{folder.name}/ten.lmdb"))
        >>> len(dataset), dataset[-1], dataset.__getitems__([2, 0])
        (10, (9, '9'), [(2, '2'), (0, '0')])
    """

    def __init__(self, path: str | os.PathLike[str], transform: Callable[[Any], Any] | None = None) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable or None, got {transform!r}.")
        self.path = Path(path).absolute()
        self.transform = transform
        file = open_for_reading(self.path)
        try:
            seal = read_seal(file, self.path)
        finally:
            os.close(file)
        self._length = seal.samples
        self._fingerprint = seal.fingerprint
        self._store: OpenStore | None = None
        self._release: weakref.finalize[Any, Any] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        store = self._opened()
        store.check_unchanged()
        sample = store.read(self._position(index))
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch; torch's DataLoader calls this."""
        if type(self).__getitem__ is not LMDBDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass has its own, which must not be left out
        store = self._opened()
        store.check_unchanged()
        samples = [store.read(self._position(index)) for index in indices]
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def close(self) -> None:
        """Free the file now, while no other thread reads; reading again opens it again."""
        if self._release is not None:
            self._release()
        self._store = self._release = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None, "_release": None}

    def __repr__(self) -> str:
        return f"LMDBDataset({str(self.path)!r}, {self._length} samples)"

    def _position(self, index: int) -> int:
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(f"An index must be an integer, got {index!r}; torch's Subset takes a part.") from None
        if not -self._length <= position < self._length:
            raise IndexError(f"{self.path} has the samples 0 to {self._length - 1}, asked for {position}.")
        return position % self._length

    def _opened(self) -> OpenStore:
        store = self._store
        if store is not None and store.process == os.getpid() and not store.closed:
            return store
        with table_lock():
            return self._open()

    def _open(self) -> OpenStore:
        store = self._store
        if store is not None and store.process == os.getpid() and not store.closed:
            return store  # another thread was faster
        if self._release is not None:
            self._release.detach()  # inherited by a fork: the parent still uses it
        store = open_store(self.path)
        if store.seal.fingerprint != self._fingerprint:
            store.close()
            raise StoreCorruptError(
                f"{self.path} is another store than this dataset was made for: the file was replaced since. Make a new "
                f"LMDBDataset to read it."
            )
        self._release, self._store = weakref.finalize(self, store.close), store
        return store
