"""Puts finished blocks into the LMDB file of a writer, in threads of its own.

When it helps: while the next block is filled with samples, which is Python's work, this one gets its checksum and goes
to the file, and what is in the file goes to the disk; all of that leaves the interpreter to the caller. A block is a
transaction of its own: that is faster than large ones, because LMDB's copy of the block is still in the processor's
cache when it is written, and the memory for it is used again.

What it costs: three buffers of the size of a block, two threads, and an error of the disk is raised some blocks late.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from lightning_speedkit.data.store.lmdb_engine import MapFull, open_engine
from lightning_speedkit.data.store.lmdb_format import block_key

__all__ = ["BlockAppender"]

_COMMIT_BYTES = 1 << 19
_SYNC_BYTES = 1 << 25
_FIRST_MAP_BYTES = 1 << 26
_BUFFERS = 3
_KEPT_BYTES = 1 << 25  # a larger buffer, made for a sample that is a block of its own, is not kept for the next one
_sync_file: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class BlockAppender:
    """An LMDB file to which blocks are appended, numbered from 0, and at the end some records.

    Fill a :meth:`buffer`, give it to :meth:`append`, and so on; then :meth:`finish`, and :meth:`close` in any case. An
    error in a thread is raised by the next call, and by every call after it. One thread at a time may call.
    """

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.crcs: list[int] = []
        self._block_bytes = block_bytes
        self._engine = open_engine(path, readonly=False, map_bytes=_FIRST_MAP_BYTES)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._made = 0
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self._unsynced: SimpleQueue[bool] = SimpleQueue()
        self._unsynced_bytes = 0
        self._waiting: list[bytes | memoryview] = []
        self._waiting_bytes = 0
        self._put = 0

    @property
    def page_bytes(self) -> int:
        """LMDB's page size."""
        return int(self._engine.stat()["psize"])

    def buffer(self, size: int) -> memoryview:
        """Memory for a block, at least ``size`` bytes with anything in them; waits until there is some."""
        size = max(size, self._block_bytes)
        if self._made < _BUFFERS and self._free.empty():
            self._made += 1
            return memoryview(bytearray(size))
        memory = self._free.get()
        self._check()
        return memory if len(memory) >= size else memoryview(bytearray(size))

    def append(self, memory: memoryview, used: int) -> None:
        """Take the first ``used`` bytes of a buffer as the next block; the buffer is no longer the caller's."""
        self._check()
        if not self._threads:
            self._threads = [threading.Thread(target=run, daemon=True) for run in (self._put_all, self._sync_all)]
            for thread in self._threads:
                thread.start()
        self._full.put((memory, used))

    def wait(self) -> None:
        """Until all blocks are in the file, with their checksums in ``crcs``."""
        if self._threads:
            self._full.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
        self._check()

    def finish(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Put these records after all blocks, and write everything to the disk."""
        self.wait()
        self._commit(records)
        self._engine.sync(True)

    def close(self) -> None:
        """Close the file as it is: blocks that were not waited for may be left out."""
        if self._file < 0:
            return
        if self._error is None:
            self._error = ValueError("The file is closed.")
        try:
            self.wait()
        except BaseException as error:
            if error is not self._error:
                raise  # interrupted: the threads may still be at work
        os.close(self._file)
        self._file = -1
        self._engine.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _put_all(self) -> None:
        while (block := self._full.get()) is not None:
            memory, used = block
            self._try(self._take, memory[:used])
            self._free.put(memory if len(memory) <= max(_KEPT_BYTES, self._block_bytes) else memory[:0])
        self._unsynced.put(False)

    def _sync_all(self) -> None:
        while self._unsynced.get():
            self._try(_sync_file, self._file)

    def _try(self, action: Callable[..., None], *arguments: object) -> None:
        if self._error is None:
            try:
                action(*arguments)
            except BaseException as error:
                self._error = error

    def _take(self, block: memoryview) -> None:
        self.crcs.append(zlib.crc32(block))
        self._waiting_bytes += len(block)
        if self._waiting_bytes < _COMMIT_BYTES:
            self._waiting.append(bytes(block))
            return
        self._unsynced_bytes += self._waiting_bytes
        self._waiting.append(block)
        self._commit([])
        if self._unsynced_bytes >= _SYNC_BYTES and self._unsynced.empty():
            self._unsynced_bytes = 0
            self._unsynced.put(True)

    def _commit(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Put the waiting blocks, and these records after them, in one transaction; the map grows until they fit."""
        blocks = [(block_key(self._put + i), block) for i, block in enumerate(self._waiting)]
        while True:
            try:
                with self._engine.begin(write=True) as transaction:
                    for key, value in [*blocks, *records]:
                        transaction.put(key, value, append=True)
                break
            except MapFull:
                self._engine.set_mapsize(2 * self._engine.info()["map_size"])
        self._put += len(blocks)
        self._waiting.clear()
        self._waiting_bytes = 0
