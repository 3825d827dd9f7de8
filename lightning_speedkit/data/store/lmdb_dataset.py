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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_speedkit.data.store.leaf_codec import Leaf
from lightning_speedkit.data.store.lmdb_format import open_for_reading, read_seal
from lightning_speedkit.data.store.lmdb_store import OpenStore, open_store, table_lock
from lightning_speedkit.data.store.sample_codec import Branch, Schema
from lightning_speedkit.errors import StoreCorruptError

if TYPE_CHECKING:
    from lightning_speedkit.data.images.image_field import ImageField

__all__ = ["LMDBDataset", "sample_rng"]


class LMDBDataset(Dataset[Any]):
    """The samples of a store by their number, each with the structure and types that were written.

    It can be pickled and can be used before and after a fork. The store of the constructor is the one that is read: a
    process that finds another one at the path (written anew meanwhile) raises instead of mixing the two.

    Args:
        path: a file that :func:`write_lmdb` or :class:`LMDBWriter` has written.
        transform: called with each sample; what it returns is handed out. It must be picklable if workers are spawned.
        fields: by key or position in the sample, how an encoded picture (``bytes``) is decoded: an
            :class:`ImageField` each.

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

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        fields: Mapping[str | int, ImageField] | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable or None, got {transform!r}.")
        if fields is not None and not isinstance(fields, Mapping):
            raise TypeError(
                f"fields must be a dict of an ImageField for each key or position of a sample, such as "
                f"{{0: ImageField(224)}} or {{'image': ImageField(224)}}, or None; got {fields!r}."
            )
        self.path = Path(path).expanduser().absolute()
        self.transform = transform
        file = open_for_reading(self.path)
        try:
            seal = read_seal(file, self.path)
        finally:
            os.close(file)
        self._length = seal.samples
        self.fingerprint = seal.fingerprint
        self._store: OpenStore | None = None
        self._release: weakref.finalize[Any, Any] | None = None
        self._fields: dict[int, ImageField] = {}
        if fields:
            self._fields = _by_leaf(self._opened().index.schema, fields, self.path)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)

    def sample(self, index: int, *, seed: Sequence[int] | None = None) -> Any:
        """A sample; what is random in its fields depends on ``seed`` and the index, or on torch's random state."""
        store = self._opened()
        store.check_unchanged()
        position = self._position(index)
        sample = store.read(position)
        if self._fields:
            sample = self._decoded(sample, store.index.schema.root, count(), position, seed)
        return sample if self.transform is None else self.transform(sample)

    def leaf_fields(self) -> dict[int, ImageField]:
        """The fields that decode, by the number of their leaf in the schema."""
        return dict(self._fields)

    def block_firsts(self) -> NDArray[np.int64]:
        """The first sample of each block of the store."""
        return self._opened().index.block_firsts()

    def where(self, index: int) -> str:
        """Where a sample lies, for a person who looks for it."""
        return f"block {self._opened().index.place(self._position(index))[0]} of {self.path}"

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch; torch's DataLoader calls this."""
        if type(self).__getitem__ is not LMDBDataset.__getitem__ or self._fields:
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

    def _decoded(
        self, value: Any, node: Branch | Leaf, leaf: Iterator[int], index: int, seed: Sequence[int] | None
    ) -> Any:
        if isinstance(node, Leaf):
            number = next(leaf)
            field = self._fields.get(number)
            if field is None:
                return value
            if not field.random:
                return field(value)
            key = (int(torch.randint(2**63 - 1, ())),) if seed is None else tuple(seed)
            return field(value, sample_rng(*key, index, number))
        keys = node.keys if node.kind == "dict" else range(len(node.items))
        items = [self._decoded(value[key], item, leaf, index, seed) for key, item in zip(keys, node.items, strict=True)]
        if node.kind == "dict":
            return dict(zip(keys, items, strict=True))
        return tuple(items) if node.kind == "tuple" else items

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
        if store.seal.fingerprint != self.fingerprint:
            store.close()
            raise StoreCorruptError(
                f"{self.path} is another store than this dataset was made for: the file was replaced since. Make a new "
                f"LMDBDataset to read it."
            )
        self._release, self._store = weakref.finalize(self, store.close), store
        return store


def sample_rng(*key: int) -> np.random.Generator:
    """The random numbers of one sample, a pure function of the key."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


def _by_leaf(schema: Schema, fields: Mapping[str | int, ImageField], path: Path) -> dict[int, ImageField]:
    places = {place: (number, leaf) for number, (place, leaf) in enumerate(schema.leaves())}
    found = {}
    for key, field in fields.items():
        if not all(hasattr(field, name) for name in ("shape", "random", "decode_into")):
            raise TypeError(f"fields[{key!r}] must be an ImageField, such as ImageField(224), got {field!r}.")
        place = key if key in places else f"[{key!r}]"
        if place not in places:
            near = ", ".join(place or "''" for place, (_, leaf) in places.items() if leaf.kind == "bytes")
            raise ValueError(f"{path} has no field {key!r}. Fields of encoded bytes: {near or 'none'}.")
        number, leaf = places[place]
        if leaf.kind != "bytes":
            raise TypeError(
                f"Field {key!r} of {path} holds {leaf.kind} {leaf.dtype}".rstrip() + ", not the encoded bytes of a "
                "picture: leave it out of fields, or pack the image files as bytes."
            )
        found[number] = field
    return found
