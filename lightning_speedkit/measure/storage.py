"""Measures how fast the disk below a folder reads: one after the other, and at random places.

What it does: writes a file without a name into the folder, which vanishes with the process however that ends, reads it
back past the page cache, and reports MB/s. In a folder that cannot be written it reads the largest file that is there.

When it helps: to decide whether data has to be staged to another disk, and whether the disk or the processor bounds a
loader. What it costs: the given seconds, at most 1 GiB of the folder's free space for that time, and that much traffic.

What to know: a file that was just written may still lie in the cache of a controller, a server or the host of a virtual
machine, so the figure is what the folder gives at best. Source: ``open(2)`` on ``O_DIRECT``, ``posix_fadvise(2)``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_speedkit.facts.storage import StorageSpeed
from lightning_speedkit.measure.file_system import read_file_system

__all__ = ["measure_storage"]

_SEQUENTIAL, _RANDOM, _READERS = 1 << 22, 1 << 17, 4
_LARGEST, _SMALLEST = 1 << 30, 1 << 24
_FILES_LOOKED_AT = 10_000


def measure_storage(folder: str | os.PathLike[str], *, seconds: float = 2.0) -> StorageSpeed:
    """How fast the disk below a folder is; nothing is left behind.

    Args:
        folder: where the data lies, or is to lie. If it cannot be written, the largest file in it is read instead.
        seconds: how long it may take, about: two fifths to write, the rest to read.

    Raises:
        FileNotFoundError: there is no such folder.
        NotADirectoryError: the path is not a folder.
        OSError: it can neither be written, nor does it hold a file of 16 MiB or more to read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     speed = measure_storage(folder, seconds=0.2)
    >>> speed.sequential_read_mb_per_second > 0, speed.random_read_mb_per_second > 0
    (True, True)
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"seconds must be a number, got {seconds!r}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be above 0 and finite, got {seconds!r}.")
    place = Path(folder).expanduser().absolute()
    if not place.is_dir():
        kind, why = (NotADirectoryError, "not a folder") if place.exists() else (FileNotFoundError, "not there")
        raise kind(f"{place} is {why}; give the folder that the data lies in.")
    with contextlib.ExitStack() as held:
        file, size, write_rate, read_path = _file_to_read(held, place, 0.4 * seconds)
        method = _past_the_cache(file)
        sequential = _sequential_rate(file, size, method, 0.3 * seconds)
        if method == "posix_fadvise":
            _forget(file)
        rate = _random_rate(file, size, 0.3 * seconds, again=method == "O_DIRECT")
    return StorageSpeed(
        folder=str(place),
        file_system=read_file_system(place),
        sequential_read_mb_per_second=sequential / 1e6,
        random_read_mb_per_second=rate / 1e6,
        write_mb_per_second=None if write_rate is None else write_rate / 1e6,
        sequential_block_bytes=_SEQUENTIAL,
        random_block_bytes=_RANDOM,
        random_readers=_READERS,
        method=method,
        probed_file=read_path,
        probed_bytes=size,
    )


def _file_to_read(held: contextlib.ExitStack, folder: Path, seconds: float) -> tuple[int, int, float | None, str]:
    """An open file, how much of it to read, how fast it was written, and its path if it is the user's."""
    why: object = "there is not enough free space"
    try:
        space = os.statvfs(folder)
        limit = min(_LARGEST, space.f_bavail * space.f_frsize // 10 // _SEQUENTIAL * _SEQUENTIAL)
        if limit >= _SMALLEST:
            file = _nameless_file(folder)
            held.callback(os.close, file)
            size, rate = _write(file, limit, seconds)
            return file, size, rate, ""
    except OSError as error:
        why = error.strerror or error
    for size, path in sorted(_files_in(folder), reverse=True):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, file)
            return file, min(size, _LARGEST) // _SEQUENTIAL * _SEQUENTIAL, None, path
    raise OSError(
        f"The speed of {folder} cannot be measured: it cannot be written ({why}), and holds no file of "
        f"{_SMALLEST >> 20} MiB or more that could be read instead."
    )


def _nameless_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError) as error:
        unsupported = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
        if isinstance(error, OSError) and error.errno not in unsupported:
            raise
    file, name = tempfile.mkstemp(dir=folder, prefix=".speed-")
    os.unlink(name)  # noqa: PTH108
    return file


def _files_in(folder: Path) -> Iterator[tuple[int, str]]:
    looked_at = 0
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)  # noqa: PTH118
            with contextlib.suppress(OSError):
                status = os.stat(path)  # noqa: PTH116
                if status.st_size >= _SMALLEST and stat.S_ISREG(status.st_mode):
                    yield status.st_size, path
            looked_at += 1
            if looked_at >= _FILES_LOOKED_AT:
                return


def _write(file: int, limit: int, seconds: float) -> tuple[int, float]:
    """Bytes that no file system can compress, until the time is over; how many, and how many a second."""
    block = random.Random(0).randbytes(_SEQUENTIAL + 4096)
    start, written = time.perf_counter(), 0
    while written < limit and (written < _SMALLEST or time.perf_counter() - start < seconds):
        shift = written // _SEQUENTIAL % 4096  # no two blocks alike, so that none is stored once for several
        done = os.pwrite(file, memoryview(block)[shift : shift + _SEQUENTIAL], written)
        if done < _SEQUENTIAL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += done
        if written % _SMALLEST == 0:  # so that the time is that of the disk, and ends soon after it is over
            os.fsync(file)
    os.fsync(file)
    return written, written / (time.perf_counter() - start)


def _past_the_cache(file: int) -> str:
    try:
        reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (AttributeError, OSError):
        return "posix_fadvise" if _forget(file) else "page cache"
    try:
        with mmap.mmap(-1, _RANDOM) as buffer:
            os.preadv(reading, [buffer], 0)  # some file systems take the flag and refuse the read
        os.dup2(reading, file, inheritable=False)
    except OSError:
        return "posix_fadvise" if _forget(file) else "page cache"
    finally:
        os.close(reading)
    return "O_DIRECT"


def _forget(file: int) -> bool:
    """Ask the page cache to drop the file; whether that was possible."""
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):
        return False
    return True


def _sequential_rate(file: int, size: int, method: str, seconds: float) -> float:
    with mmap.mmap(-1, _SEQUENTIAL) as buffer:
        start, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - start < seconds:
            if done and done % size == 0 and method == "posix_fadvise":
                _forget(file)
            done += os.preadv(file, [buffer], done % size)
        return done / (time.perf_counter() - start)


def _random_rate(file: int, size: int, seconds: float, *, again: bool) -> float:
    """Several threads, as one request at a time leaves a solid-state disk idle. ``again``: more than once."""
    places = list(range(0, size - _RANDOM + 1, _RANDOM))
    random.Random(0).shuffle(places)
    done = [0] * _READERS
    start = time.perf_counter()

    def read(number: int) -> None:
        with mmap.mmap(-1, _RANDOM) as buffer:
            mine = places[number::_READERS]
            for place in itertools.cycle(mine) if again else mine:
                done[number] += os.preadv(file, [buffer], place)
                if time.perf_counter() - start > seconds:
                    return

    _run_in_threads(read, _READERS)
    return sum(done) / (time.perf_counter() - start)


def _run_in_threads(function: Callable[[int], None], count: int) -> None:
    faults: list[BaseException] = []

    def run(number: int) -> None:
        try:
            function(number)
        except BaseException as error:  # raised again in the caller's thread
            faults.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
