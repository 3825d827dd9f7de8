"""The staged copies in a folder: who uses them, and the removal of those used longest ago.

Each copy is a folder ``<name>-<16 hex digits>`` with the files, their record and a file ``.in-use``.
While it is made, its name ends in ``.part``; while it is removed, in ``.gone``. A process that uses a copy holds a
shared lock (``flock``) on ``.in-use``, which ends with the process and its forked children; who makes or removes it
holds it alone.

Only a folder with such a name and a readable record is ever touched, and only the files that the record names are
deleted: what anyone else puts beside them or into them stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_speedkit.data.staging.staged_record import RECORD_FILES, Record, read_record
from lightning_speedkit.errors import StagingError

__all__ = ["Entry", "bytes_on_disk", "entries_in", "lock_entry", "make_room", "remove_entry", "shown_bytes"]

_IN_USE = ".in-use"
_NAME = re.compile(r"[^/]+-[0-9a-f]{16}(\.part|\.gone)?")
_SPARE_BYTES = 1 << 20  # for the folder and the records


@dataclass(frozen=True, slots=True)
class Entry:
    """A copy, whole or in part, and when it was used last (seconds of the system's clock)."""

    folder: Path
    record: Record
    last_used: float

    @property
    def is_whole(self) -> bool:
        """Published: complete and checked."""
        return not self.folder.name.endswith((".part", ".gone"))


def lock_entry(folder: Path, *, alone: bool) -> int | None:
    """A descriptor that holds the copy, to use it or ``alone`` to change it; ``None`` if it is held or not there.

    Taking it marks the copy as used just now.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if alone else 0)
    try:
        file = os.open(folder / _IN_USE, flags, 0o666)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:  # a copy of somebody else, who lets others read it
        file = os.open(folder / _IN_USE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        if os.path.samestat((folder / _IN_USE).stat(), os.fstat(file)):
            if not alone:
                with contextlib.suppress(OSError):
                    os.utime(file)
            return file
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        pass  # in use, or taken away between the two lines
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def entries_in(root: Path) -> list[Entry]:
    """All copies of this kind in a folder, also those in the making; the one used longest ago comes first."""
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not _NAME.fullmatch(folder.name) or folder.is_symlink():
            continue
        record = read_record(folder)
        if record is not None:
            with contextlib.suppress(OSError):
                found.append(Entry(folder, record, (folder / _IN_USE).stat().st_mtime))
    return sorted(found, key=lambda entry: (not entry.folder.name.endswith(".gone"), entry.last_used))


def remove_entry(folder: Path, *, force: bool = False) -> bool:
    """Remove a copy unless a process uses it; ``force`` removes it nevertheless. Whether it is gone.

    It is renamed first, so that nobody finds half of it; a process that has its files open can go on reading them. A
    folder without a record is removed only if it holds nothing else.
    """
    file = lock_entry(folder, alone=True)
    if file is None and not force:
        return False
    try:
        record = read_record(folder)
        if record is not None and not folder.name.endswith(".gone"):
            gone = folder.with_name(f"{folder.name.removesuffix('.part')}.gone")
            if gone.exists():
                _delete(gone, read_record(gone))
            with contextlib.suppress(OSError):  # if somebody has put a file into the other, delete this one in place
                folder = folder.rename(gone)
        _delete(folder, record)
    except PermissionError:  # a copy of another user
        if force:
            raise
        return False
    finally:
        if file is not None:
            os.close(file)
    return not folder.exists() or record is not None


def make_room(root: Path, keep: Path, *, whole_bytes: int, new_bytes: int, max_bytes: int | None) -> None:
    """See that ``new_bytes`` more fit on the disk, and ``whole_bytes`` into ``max_bytes``; removes other copies for it.

    Those used longest ago go first, and none if that would not be enough. ``keep`` is the copy in the making, of which
    ``new_bytes`` are still to come.

    Raises:
        StagingError: it does not fit, even without all copies that no process uses.
    """
    for gone in [entry for entry in entries_in(root) if entry.folder.name.endswith(".gone")]:
        remove_entry(gone.folder)  # of a process that was killed while it removed
    while True:
        others = [entry for entry in entries_in(root) if entry.folder != keep]
        idle = [entry for entry in others if _is_idle(entry)]
        awaited = sum(_awaited(entry) for entry in others if entry not in idle)
        space = new_bytes + _SPARE_BYTES - (_free_bytes(root) - awaited)
        share = 0 if max_bytes is None else whole_bytes + sum(entry.record.bytes for entry in others) - max_bytes
        if space <= 0 and share <= 0:
            return
        removed = [remove_entry(entry.folder) for entry in _longest_unused(idle, space, share)]
        if not any(removed):
            break
    needed, limit = new_bytes + _SPARE_BYTES, f"{shown_bytes(_free_bytes(root))} are free"
    limit += f", of which other copies under way still need {shown_bytes(awaited)}" if awaited else ""
    if share > 0:
        needed, limit = whole_bytes, f"max_bytes={max_bytes} allows {shown_bytes(max(0, whole_bytes - share))}"
    busy = ", ".join(entry.folder.name for entry in others if entry not in idle)
    raise StagingError(
        f"{root} lacks the space: {shown_bytes(needed)} are needed, {limit}, even if all copies that no process "
        f"uses were removed.{f' In use: {busy}.' if busy else ''} Free some space, or stage to another folder."
    )


def shown_bytes(size: int) -> str:
    """A size as an error tells it.

    >>> shown_bytes(999), shown_bytes(880_928), shown_bytes(12_345_678_901)
    ('999 bytes', '880,928 bytes (0.88 MB)', '12,345,678,901 bytes (12.35 GB)')
    """
    if size < 10_000:
        return f"{size:,} bytes"
    return f"{size:,} bytes ({size / 1e9:,.2f} GB)" if size >= 10**9 else f"{size:,} bytes ({size / 1e6:,.2f} MB)"


def _longest_unused(idle: list[Entry], space: int, share: int) -> list[Entry]:
    """As many as it takes to free ``space`` bytes of the disk and ``share`` of the limit; none if all do not do."""
    chosen = []
    for entry in idle:
        if space <= 0 and share <= 0:
            break
        chosen.append(entry)
        space -= _bytes_of(entry)
        share -= entry.record.bytes
    return chosen if space <= 0 and share <= 0 else []


def _is_idle(entry: Entry) -> bool:
    file = lock_entry(entry.folder, alone=True)
    if file is None:
        return False
    os.close(file)
    return True


def _awaited(entry: Entry) -> int:
    """What a copy that another process is making will still take."""
    return 0 if entry.is_whole else max(0, entry.record.bytes - _bytes_of(entry))


def bytes_on_disk(paths: Iterable[Path]) -> int:
    """The sizes of those files that are there; another process may rename or remove them at any moment."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _bytes_of(entry: Entry) -> int:
    return bytes_on_disk(entry.folder / file.name for file in entry.record.files)


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _delete(folder: Path, record: Record | None) -> None:
    names = [] if record is None else [file.name for file in record.files]
    for name in (*names, *RECORD_FILES, _IN_USE):  # the record goes after what it names
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
