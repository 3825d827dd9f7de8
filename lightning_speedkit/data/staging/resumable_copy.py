"""Copies one file, reading ahead in several threads, so that a copy that breaks off can go on where it stopped.

How far the copy is counts only what was synced to the disk, together with the checksum of just these bytes. So after a
crash of the machine nothing is taken for copied that is not there.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightning_speedkit.data.staging.staged_record import CopiedFile
from lightning_speedkit.data.staging.staging_source import SourceFile

__all__ = ["attempts", "copy_file", "crc_of_file"]

_CHUNK_BYTES = 1 << 23
_SAVE_BYTES = 1 << 28  # between two syncs
_SAVE_SECONDS = 5.0
_ATTEMPTS = 4
_PAUSE_SECONDS = 0.5  # before the second attempt; doubled before each further one


def copy_file(
    source: SourceFile, target: Path, state: CopiedFile, *, save: Callable[[], None], moved: Callable[[int], None]
) -> None:
    """Copy what is missing of ``source`` to ``target``; ``state`` says how far it is, before and after.

    ``save()`` is called whenever ``state`` has changed; ``moved(bytes)`` after each chunk, and at first with what was
    there already. A server that sends whole files only is read from the beginning.

    Raises:
        ConnectionError: the source could not be read, not even in several attempts.
        OSError: the target could not be written.
    """
    there = target.stat().st_size if target.exists() else 0
    if source.read is None or there < state.copied:
        state.copied, state.crc32 = 0, 0
    with target.open("r+b" if state.copied else "wb") as file:
        file.truncate(state.copied)  # what came after the last sync is not in the checksum
        file.seek(state.copied)
        position, crc = state.copied, state.crc32
        moved(position)
        saved_at = time.monotonic()
        for data in _ranges(source, position) if source.read is not None else _whole(source):
            file.write(data)
            crc = zlib.crc32(data, crc)
            position += len(data)
            moved(len(data))
            if position - state.copied >= _SAVE_BYTES or time.monotonic() - saved_at >= _SAVE_SECONDS:
                file.flush()
                os.fsync(file.fileno())
                state.copied, state.crc32, saved_at = position, crc, time.monotonic()
                save()
        file.flush()
        os.fsync(file.fileno())
    if source.size is not None and position != source.size:
        state.copied, state.crc32 = 0, 0
        save()
        raise ConnectionError(f"{source.name} has {source.size:,} bytes, but {position:,} were sent")
    state.size, state.copied, state.crc32 = position, position, crc
    state.mtime_ns = target.stat().st_mtime_ns
    save()


def attempts() -> Iterator[int]:
    """Once for each attempt at a source that may not answer, from 0 on, with the pauses between them."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        yield attempt


def crc_of_file(path: Path) -> int:
    """The CRC-32 of all bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def _ranges(source: SourceFile, start: int) -> Iterator[bytes]:
    """The file from ``start`` on, in order; the next chunks are read while one is written."""
    assert source.size is not None
    pool = ThreadPoolExecutor(source.readers, thread_name_prefix="speedkit-staging")
    ahead: deque[Future[bytes]] = deque()
    try:
        while start < source.size or ahead:
            while start < source.size and len(ahead) <= source.readers:
                size = min(_CHUNK_BYTES, source.size - start)
                ahead.append(pool.submit(_read_exactly, source, start, size))
                start += size
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read_exactly(source: SourceFile, start: int, size: int) -> bytes:
    assert source.read is not None
    for _ in attempts():
        try:
            data = source.read(start, size)
            if len(data) == size:
                return data
            why, cause = f"it sent {len(data)} of {size} bytes from byte {start} on", None
        except (FileNotFoundError, PermissionError) as error:
            raise ConnectionError(f"{source.name} went away while it was copied: {error}") from error
        except Exception as error:  # each library that fsspec uses has errors of its own
            why, cause = f"{type(error).__name__}: {error}".rstrip(": "), error
    raise ConnectionError(f"{source.name} could not be read in {_ATTEMPTS} attempts: {why}") from cause


def _whole(source: SourceFile) -> Iterator[bytes]:
    stream = source.stream()
    while True:
        try:
            data = next(stream, None)
        except Exception as error:
            raise ConnectionError(f"{source.name} broke off: {type(error).__name__}: {error}") from error
        if data is None:
            return
        yield data
