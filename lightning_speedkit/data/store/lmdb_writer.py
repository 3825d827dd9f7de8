"""Writes samples into one LMDB file that is either complete or not there.

When it helps: many small files, slow decoding that can be done once, or a dataset that several runs read. The store is
written beside its final name, synced, sealed with checksums, and renamed; a run that is killed, a full disk or an error
in the samples leaves what was there before. The map grows by itself and no sparse file is left.

What it costs: one copy of each sample, some buffers of the size of a block, a thread that writes while samples are
encoded, and the disk space of the new store while the old one is still there.

Source: py-lmdb issues #85, #166 and #444 (map size), #344 (truncated files); LMDB's ``mdb_env_set_mapsize``.
"""

from __future__ import annotations

import operator
import os
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from lightning_speedkit.data.store.block_appender import BlockAppender
from lightning_speedkit.data.store.index_builder import IndexBuilder
from lightning_speedkit.data.store.leaf_codec import Bytes, Shape
from lightning_speedkit.data.store.lmdb_engine import LmdbError
from lightning_speedkit.data.store.lmdb_format import check_replaceable, seal_for
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.data.store.sample_encoder import SampleEncoder, sample_encoder
from lightning_speedkit.data.store.write_lock import exclusive_lock, sync_folder
from lightning_speedkit.errors import EmptyStoreError, SampleMismatchError, StoreWriteError

__all__ = ["LMDBWriter"]

_LARGEST_SAMPLE = 1 << 30


class LMDBWriter:
    """A store being written. Use it in a ``with`` block: it is published when the block ends without an error.

    Several threads may write; the samples are in the order in which they came. A forked child may leave the block, but
    only the process that entered it writes and publishes.

    Args:
        path: the file to write. Missing folders are made; an older store at that path is replaced at the end, and any
            other file is refused.
        block_bytes: how many bytes of samples are stored, checked and read together; a larger sample is a block of
            its own.

    Raises:
        StoreWriteError: if the file cannot be written, or another writer is at work on the same path.

    Example::

        >>> import tempfile, torch
        >>> from lightning_speedkit.data import LMDBDataset, LMDBWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/squares.lmdb"
        >>> with LMDBWriter(path) as writer:
        ...     for i in range(4):
        ...         writer.write((torch.tensor([i]), i * i))
        >>> LMDBDataset(path)[3]
        (tensor([3]), 9)
    """

    def __init__(self, path: str | os.PathLike[str], *, block_bytes: int = 1 << 20) -> None:
        try:
            block_bytes = operator.index(block_bytes)
        except TypeError:
            raise TypeError(f"block_bytes must be an int, got {block_bytes!r}.") from None
        if not 4096 <= block_bytes <= 1 << 28:
            raise ValueError(f"block_bytes must be from 4096 to {1 << 28} (256 MiB), got {block_bytes!r}.")
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self._block_bytes = block_bytes
        self._builder: IndexBuilder | None = None
        self._encode: SampleEncoder | None = None
        self._block = -1  # the one that is being filled, its memory, and how much of that is used
        self._memory = memoryview(b"")
        self._used = 0
        self._appender: BlockAppender | None = None
        self._entered = False
        self._broken = False  # a write ended halfway: what is counted and what is written may differ
        self._owner = 0
        self._lock = threading.Lock()
        self._held = ExitStack()  # closed in reverse: the appender, the temporary file, the lock
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")

    @property
    def samples(self) -> int:
        """The number of samples written so far."""
        return 0 if self._builder is None else self._builder.samples

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("This LMDBWriter was used already; make another one.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_replaceable(self.path)
            lock = self.path.with_name(f".{self.path.name}.lock")
            self._held.enter_context(exclusive_lock(lock, wait=False))
            self._owner = os.getpid()
            self._temporary.unlink(missing_ok=True)  # whoever left it is dead: the lock is ours
            self._held.callback(self._temporary.unlink, missing_ok=True)
            self._appender = BlockAppender(self._temporary, self._block_bytes)
            self._held.callback(self._appender.close)
        except BlockingIOError as error:
            raise StoreWriteError(f"Another writer is at work on {self.path}; wait for it to end.") from error
        except BaseException as error:  # interrupted too: the block is not entered, so nothing else lets go of these
            self._held.close()
            if isinstance(error, (OSError, LmdbError)):
                raise self._failed(error) from error
            raise
        self._entered = True
        return self

    def write(self, sample: Any) -> None:
        """Add one sample; it is copied, so its memory may be reused.

        Raises:
            TypeError: the first sample holds something that cannot be stored.
            SampleMismatchError: the structure or a type differs from the first sample. The sample is left out and the
                writer can go on.
            StoreWriteError: the disk is full, or cannot be written. Then nothing more can be written, and nothing is
                published.
        """
        if self._appender is not None and os.getpid() != self._owner:
            raise RuntimeError("This LMDBWriter belongs to the process that was forked; write there.")
        with self._lock:
            if self._appender is None:
                raise RuntimeError("Open the LMDBWriter first: with LMDBWriter(path) as writer: writer.write(sample).")
            self._check_whole()
            self._write(sample)

    def _write(self, sample: Any) -> None:
        if self._encode is None or self._builder is None:
            self._begin(sample)
            return
        try:
            parts, shapes = self._encode(sample)
        except SampleMismatchError as error:
            raise SampleMismatchError(f"Sample {self.samples}, {error}.") from None
        self._add(self._builder, parts, shapes)

    def _begin(self, sample: Any) -> None:
        try:
            schema = Schema.of(sample)
            encode = sample_encoder(schema)
            parts, shapes = encode(sample)
        except TypeError as error:
            raise TypeError(f"Sample 0: {error}") from None
        except SampleMismatchError as error:
            raise SampleMismatchError(f"Sample 0, {error}.") from None
        builder = IndexBuilder(schema, sum(map(len, parts)), self._block_bytes)
        self._add(builder, parts, shapes)
        self._builder, self._encode = builder, encode

    def _add(self, builder: IndexBuilder, parts: list[Bytes], shapes: tuple[Shape, ...]) -> None:
        size = sum(map(len, parts))
        if size > _LARGEST_SAMPLE:
            raise ValueError(f"Sample {self.samples} has {size} bytes; the largest that is stored is 1 GiB.")
        self._broken = True
        block, start = builder.add(size, shapes)
        if block > self._block:
            self._next_block(size)
        elif start > self._used:
            self._memory[self._used : start] = bytes(start - self._used)
        for part in parts:
            end = start + len(part)
            self._memory[start:end] = part
            start = end
        self._used = start
        self._broken = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner:  # a forked child: store, temporary file and lock are its parent's
            self._held.pop_all()
            return
        with self._lock, self._held:
            try:
                if error is None:
                    self._publish()
            finally:
                self._appender = None

    def _next_block(self, size: int) -> None:
        assert self._appender is not None
        try:
            if self._block >= 0:
                self._appender.append(self._memory, self._used)
            self._memory, self._used = self._appender.buffer(size), 0
            self._block += 1
        except (OSError, LmdbError) as error:
            raise self._failed(error) from error

    def _publish(self) -> None:
        self._check_whole()
        if self._builder is None or self._appender is None:
            raise EmptyStoreError(f"There were no samples to write to {self.path}.")
        try:
            self._appender.append(self._memory, self._used)
            self._appender.wait()
            self._appender.finish(self._builder.records(self._appender.page_bytes, self._appender.crcs))
            self._appender.close()
            _seal(self._temporary)
            check_replaceable(self.path)  # it may have come meanwhile
            self._temporary.replace(self.path)
            sync_folder(self.path.parent)
        except StoreWriteError:
            raise
        except (OSError, LmdbError) as error:
            raise self._failed(error) from error

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreWriteError(f"An earlier write to {self.path} failed, so it is not published; begin it anew.")

    def _failed(self, error: Exception) -> StoreWriteError:
        before = "the store that was there is unchanged" if os.access(self.path, os.F_OK) else "nothing was left there"
        return StoreWriteError(f"{self.path} could not be written ({error}{_space_left(self.path.parent)}); {before}.")


def _seal(path: Path) -> None:
    with path.open("r+b") as file:
        seal = seal_for(file.fileno())
        file.seek(seal.lmdb_bytes)
        file.write(seal.to_bytes())
        file.flush()
        os.fsync(file.fileno())


def _space_left(folder: Path) -> str:
    """For the message: LMDB calls a full disk an input/output error."""
    try:
        return f"; {shutil.disk_usage(folder).free} bytes are free there"
    except OSError:
        return ""
