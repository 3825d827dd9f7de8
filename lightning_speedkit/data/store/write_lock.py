"""Safe writing: an exclusive lock on a file beside the thing that is written, and a rename that outlives a crash.

The lock is the kernel's (``flock``), so it ends with the process that held it, however that ended, and no lock is left
behind that a person would have to delete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["exclusive_lock", "sync_folder"]

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def exclusive_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of that name; the file is made if needed and removed afterwards.

    Args:
        path: the lock file, which holds nothing else.
        wait: wait for another holder; otherwise raise ``BlockingIOError`` if there is one.

    Raises:
        OSError: the folder cannot be written, or its file system has no such locks.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name, "x.lock")
    >>> with exclusive_lock(path, wait=True):
    ...     with exclusive_lock(path, wait=False):
    ...         pass
    Traceback (most recent call last):
        ...
    BlockingIOError: [Errno 11] Resource temporarily unavailable
    >>> path.exists()
    False
    """
    file = _acquire(path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child must not end its parent's lock
            path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Put the names of a folder on the disk, so that a rename in it is not undone by a crash of the machine."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _acquire(path: Path, operation: int) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, operation)
            if _is_at(path, file):
                return file
        except BaseException as error:
            os.close(file)
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                path.unlink(missing_ok=True)
                what = "the file system has no locks (flock): write on a local disk and copy the file"
                raise OSError(error.errno, what, str(path)) from error
            raise
        os.close(file)  # the holder before us has removed the file: ours is no longer the one that others see


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
