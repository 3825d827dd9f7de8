"""A store opened for reading: once per process and file, shared by all datasets over it, safe across fork.

LMDB must not open one file twice in a process, and an environment that a forked child inherits must not be used there
(py-lmdb from 2.0 on refuses the second open even after a fork). So the process keeps a table of open stores by inode,
counts who uses them, and closes what it inherited right after a fork.

A published store never changes; if other code writes into the file nevertheless, reading raises. Reading hands out
copies only. The checksum of a block is compared when the process touches the block first.
"""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_speedkit.data.store.lmdb_engine import LmdbError, open_engine
from lightning_speedkit.data.store.lmdb_format import CRC, INDEX, META, Seal, block_key, open_for_reading, read_seal
from lightning_speedkit.data.store.lmdb_index import StoreIndex
from lightning_speedkit.data.store.lmdb_verify import check_crc_record, damaged_block
from lightning_speedkit.errors import StoreCorruptError, StoreError

__all__ = ["OpenStore", "open_store", "table_lock"]

_FileId = tuple[int, int]
_FileState = tuple[int, int]


class OpenStore:
    """An open store. Get one from :func:`open_store`; give it back with :meth:`close`."""

    def __init__(self, path: Path, file: int, state: _FileState, seal: Seal, engine: Any) -> None:
        self.path = path
        self.process = os.getpid()
        self.users = 1
        self.closed = False
        self.seal = seal
        self._identity = _file_id(os.fstat(file))
        self._state = state
        self._engine = engine
        self._lock = threading.Lock()
        self._blocks: dict[int, NDArray[np.uint8]] = {}
        self._transaction: Any = engine.begin(buffers=True)
        meta, index, crc = (self._record(key) for key in (META, INDEX, CRC))
        self._crcs = check_crc_record(crc, meta, index, path, seal)
        self.index = StoreIndex.of(bytes(meta), index)
        self.index.check()
        self._file = os.fdopen(os.dup(file), "rb", buffering=0)

    def read(self, sample: int) -> Any:
        """A sample by its number, from 0 to ``index.samples - 1``; it shares no memory with the store."""
        number, start = self.index.place(sample)
        shapes = self.index.shapes(sample)
        size = self.index.size(shapes)
        block = self.block(number)
        if start + size > len(block) and size:
            raise StoreCorruptError(f"{self.path}: sample {sample} ends outside of its block {number}.")
        return self.index.schema.decode(block[start : start + size].data, shapes)

    def check_unchanged(self) -> None:
        """Raise if other code wrote into the open file: the map would show new bytes, or end the process by SIGBUS.

        A look at size and time of the file before each read: it finds what was done, not what is being done.
        """
        if _state_of(self._file.fileno()) != self._state:
            raise StoreCorruptError(
                f"{self.path} was changed in place while it was open, so what it holds is not known. Close all "
                f"datasets over it and make new ones. To replace a store, use write_lmdb, or copy beside it and rename."
            )

    def block(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a block, read-only and valid while the store is open; checked when touched first."""
        block = self._blocks.get(number)
        if block is not None:
            return block
        with self._lock:
            data = self._record(block_key(number))
            if zlib.crc32(data) != self._crcs[number]:
                raise damaged_block(self.path, number, self.index)
            block = self._blocks[number] = np.frombuffer(data, dtype=np.uint8)
        return block

    def close(self) -> None:
        """One user less; the last one closes the environment. Does nothing in a forked child, which has its own."""
        with _table_lock:
            if self.process != os.getpid():
                return
            self.users -= 1
            if self.users == 0:
                _table.pop(self._identity, None)
                self.abandon()

    def abandon(self) -> None:
        """Close the environment, whoever uses it; again and again does no harm."""
        self.closed = True
        self._blocks.clear()
        self.__dict__.pop("index", None)  # its arrays view the map
        self._transaction.abort()
        self._engine.close()
        self._file.close()

    def _record(self, key: bytes) -> memoryview:
        try:
            value: memoryview | None = self._transaction.get(key)
        except LmdbError as error:  # the head of a block's pages, which only verify_lmdb has under a checksum
            raise StoreCorruptError(f"{self.path}: LMDB cannot read the record {key!r}: {error}") from error
        if value is None:
            raise StoreCorruptError(f"{self.path} has no record {key!r}.")
        return value


_table: dict[_FileId, OpenStore] = {}
_table_process = os.getpid()  # whose table it is
_table_lock = threading.RLock()  # the collector may close a dataset while this thread opens another


def open_store(path: Path) -> OpenStore:
    """The open store of that file, the same one for all callers of this process; each calls ``close`` once.

    Raises:
        StoreNotFoundError, StoreCorruptError, StoreVersionError: see :func:`~lightning_speedkit.data.verify_lmdb`.
        StoreError: LMDB cannot open it, for example because other code of this process has opened the file.
    """
    with _table_lock:
        if _table_process != os.getpid():
            _close_inherited()
        while True:
            file = open_for_reading(path)
            try:
                identity = _file_id(os.fstat(file))
                store = _table.get(identity)
                if store is not None:
                    store.users += 1  # first of all: the collector may take the last other user at any line
                    if store.closed:
                        continue
                    try:
                        store.check_unchanged()
                    except StoreCorruptError:
                        store.close()
                        raise
                    return store
                store = _open(path, file, identity)
                if store is not None:
                    _table[identity] = store
                    return store
            finally:
                os.close(file)


def table_lock() -> threading.RLock:
    """The lock of this process's table of open stores, for a caller that must open a store at most once."""
    return _table_lock


def _open(path: Path, file: int, identity: _FileId) -> OpenStore | None:
    """A new open store, or ``None`` if the file was replaced before LMDB, which wants a name, could open it."""
    state = _state_of(file)
    seal = read_seal(file, path)
    try:
        engine = open_engine(path, readonly=True, map_bytes=seal.lmdb_bytes)
    except LmdbError as error:
        if not _is_still_at(path, identity):
            return None
        raise StoreError(f"LMDB cannot open {path}: {error}") from error
    try:
        if _is_still_at(path, identity):
            return OpenStore(path, file, state, seal, engine)
    except BaseException:
        engine.close()
        raise
    engine.close()
    return None


def _is_still_at(path: Path, identity: _FileId) -> bool:
    try:
        return _file_id(path.stat()) == identity
    except FileNotFoundError:
        return False


def _state_of(file: int) -> _FileState:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _file_id(status: os.stat_result) -> _FileId:
    return status.st_dev, status.st_ino


def _close_inherited() -> None:
    """In a forked child: close what the parent had open, so that the child can open it for itself.

    An interrupt may end it at any line, so it can be called again; the next opening of a store does that.
    """
    global _table_process
    for identity, store in list(_table.items()):
        store.abandon()
        _table.pop(identity, None)
    _table_process = os.getpid()


# No fork while a thread is between opening an environment and entering it in the table: the child could not close it.
# CPython drops what is raised here, so a Ctrl-C in a function written in Python could leave the lock held for ever: the
# lock's own methods cannot be interrupted once they have it. In the child it is made anew, whoever held it.
os.register_at_fork(
    before=_table_lock.acquire,
    after_in_parent=_table_lock.release,
    after_in_child=_table_lock._at_fork_reinit,  # type: ignore[attr-defined]
)
os.register_at_fork(after_in_child=_close_inherited)
