"""An LMDB database of another program, as tutorials write it: one value per sample.

If its values are Python pickles, they are read only if ``trust_pickle`` says so: loading a pickle runs whatever code
is in it. A pickled sample is taken as it is. Other values stay what they are: a sample is then the dict
``{"key": str, "value": bytes}``.

The order is that of the keys: of their numbers if all are numbers, else of their bytes. Keys that describe the
database, such as ``__len__`` and ``__keys__``, are left out. The file is read by plain reads and not mapped, so a file
that is cut short is an error and does not end the process. It must not be written to meanwhile.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_speedkit.data.sources.source import Item, Source
from lightning_speedkit.data.store.lmdb_pages import Record, read_exactly, read_lmdb_meta, walk_tree
from lightning_speedkit.errors import SourceError, StoreCorruptError

__all__ = ["ForeignLmdb", "lmdb_file"]

_DESCRIBING = frozenset(
    f"{before}{word}{after}".encode()
    for before, after in (("", ""), ("__", "__"), ("_", "_"))
    for word in ("len", "length", "keys", "meta", "metadata", "size", "num-samples", "num_samples", "nSamples", "info")
)
_DATABASE_RECORD = 48
_LARGEST_NUMBER = 18  # digits


class ForeignLmdb(Source):
    """The samples of an LMDB database.

    Args:
        path: the ``.mdb`` file or the folder that it lies in.
        trust_pickle: load values that are pickles, whatever code that runs.

    Raises:
        SourceError: not an LMDB 0.9 file, cut short, or pickles without ``trust_pickle``.
    """

    format = "lmdb"
    read_in_threads = True

    def __init__(self, path: Path, *, trust_pickle: bool = False) -> None:
        self._file = -1
        self.path = lmdb_file(path)
        self._trust = trust_pickle
        self._file = _open(self.path)
        records = self._records()
        self._left_out = sorted(record.key.decode() for record in records if record.key in _DESCRIBING)
        self._entries = _in_order([record for record in records if record.key not in _DESCRIBING])
        if self._entries and all(record.size == _DATABASE_RECORD for record in self._entries[:64]):
            self._refuse_databases()
        self._pickled = bool(self._entries) and self._is_pickled(self._entries[0])

    def __len__(self) -> int:
        return len(self._entries)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def items(self) -> Iterator[Item]:
        """One item per key."""
        for record in self._entries:
            place = f"{self.path} key {record.key!r}"
            yield Item(place, self._reader(place, record))

    def notes(self) -> tuple[str, ...]:
        """The keys that were left out."""
        return (
            (f"keys that describe the database were left out: {', '.join(self._left_out)}",) if self._left_out else ()
        )

    def _records(self) -> list[Record]:
        try:
            meta = read_lmdb_meta(self._file)
            if meta is None:
                raise SourceError(
                    f"{self.path} is not an LMDB 0.9 file: it is something else, damaged, or written by a newer LMDB."
                )
            size, needed = os.fstat(self._file).st_size, (meta.last_page + 1) * meta.page_bytes
            if size < needed:
                raise SourceError(f"{self.path} was cut short: it has {size} bytes and needs {needed}.")
            return walk_tree(self._file, meta)[1]
        except (StoreCorruptError, OSError, struct.error, IndexError, ValueError, OverflowError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{self.path} is damaged: {error}") from error

    def _value(self, record: Record) -> bytes:
        try:
            return read_exactly(self._file, record.start, record.size)
        except (StoreCorruptError, OSError, OverflowError) as error:
            raise SourceError(f"{self.path} key {record.key!r}: {error}") from error

    def _is_pickled(self, record: Record) -> bool:
        value = self._value(record)
        if value[:1] == b"\x80" and value[1:2] in b"\x02\x03\x04\x05" and value[-1:] == b".":
            if not self._trust:
                raise SourceError(
                    f"{self.path} holds Python pickles, and loading a pickle runs whatever code is in it. If you made "
                    f"this file, or trust whoever did, give --trust-pickle."
                )
            return True
        if not self._trust:
            return False
        try:
            pickle.loads(value)  # noqa: S301  # trusted; one of the old text protocols has no mark to know it by
        except Exception as error:
            raise SourceError(
                f"{self.path} does not hold pickles (the first value begins with {value[:8]!r}), so there is nothing "
                f"to trust: leave --trust-pickle out, and the values are packed as bytes."
            ) from error
        return True

    def _reader(self, place: str, record: Record) -> Callable[[], Any]:
        def read() -> Any:
            value = self._value(record)
            if not self._pickled:
                return {"key": record.key.decode("utf-8", "backslashreplace"), "value": value}
            try:
                return pickle.loads(value)  # noqa: S301  # the user said that these pickles are trusted
            except MemoryError:
                raise
            except Exception as error:
                raise SourceError(f"{place}: cannot be unpickled ({type(error).__name__}: {error}).") from error

        return read

    def _refuse_databases(self) -> None:
        """A database below another one is a record of 48 bytes whose last 8 are the page of its root."""
        last_page = os.fstat(self._file).st_size // 512
        for record in self._entries[:64]:
            root = int.from_bytes(self._value(record)[40:], "little")
            if root > last_page and root != 2**64 - 1:
                return
        names = ", ".join(repr(record.key) for record in self._entries[:5])
        raise SourceError(
            f"{self.path} holds databases of their own ({names}), which are not read: write a function that yields "
            f"their samples and give it as module:function."
        )


def lmdb_file(path: Path) -> Path:
    """The file of an LMDB environment, which is often given as the folder that it lies in."""
    return path / "data.mdb" if path.is_dir() else path


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error.strerror}.") from error


def _in_order(records: list[Record]) -> list[Record]:
    if all(record.key.isdigit() and len(record.key) <= _LARGEST_NUMBER for record in records):
        return sorted(records, key=lambda record: int(record.key))
    return sorted(records, key=lambda record: record.key)
