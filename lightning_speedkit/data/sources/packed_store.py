"""A store of this kit as a source: to divide it, to take a part of it, or to make its pictures smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_speedkit.data.sources.class_names import read_classes
from lightning_speedkit.data.sources.source import Item, Source
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.errors import SourceError, StoreError

__all__ = ["PackedStore"]


class PackedStore(Source):
    """The samples of a store, with the names of its classes if it has them.

    Raises:
        SourceError: the file is not a store, or is damaged.
    """

    format = "store"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dataset = LMDBDataset(path)
        except StoreError as error:
            raise SourceError(str(error)) from error
        self.classes = read_classes(path) or ()

    def __len__(self) -> int:
        return len(self._dataset)

    def items(self) -> Iterator[Item]:
        """One item per sample."""
        for number in range(len(self)):
            yield Item(f"{self.path} sample {number}", self._reader(number))

    def _reader(self, number: int) -> Callable[[], Any]:
        def read() -> Any:
            try:
                return self._dataset[number]
            except StoreError as error:
                raise SourceError(f"sample {number}: {error}") from error

        return read
