"""Makes one staged copy: finds room, copies or goes on with what broke off, checks, and publishes by a rename.

Only the process whose turn it is comes here. The copy grows in a folder whose name ends in ``.part``, beside a record
of how far it is; the folder gets its final name when all files are on the disk and were read back. What has the name of
a store has to be one, since a web server may send a page for any address. A store is checked against the checksums in
it (:func:`~lightning_speedkit.data.verify_lmdb`), which covers the way from the source; any other file by its size,
and, if it was copied in parts, by the checksum of what came in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_speedkit.data.staging.resumable_copy import copy_file, crc_of_file
from lightning_speedkit.data.staging.staged_entries import (
    bytes_on_disk,
    entries_in,
    lock_entry,
    make_room,
    remove_entry,
    shown_bytes,
)
from lightning_speedkit.data.staging.staged_record import CopiedFile, Record, read_record, write_record
from lightning_speedkit.data.staging.staging_folder import make_folder
from lightning_speedkit.data.staging.staging_source import Source
from lightning_speedkit.data.store.lmdb_format import has_seal
from lightning_speedkit.data.store.lmdb_verify import verify_lmdb
from lightning_speedkit.data.store.write_lock import exclusive_lock, sync_folder
from lightning_speedkit.errors import StagingError, StoreError, StoreVersionError

__all__ = ["copied_bytes", "fault_of", "make_copy", "progress_bar"]

_SHOWN_BYTES = 40
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_copy(
    folders: list[Path],
    source: Source,
    *,
    look_again: Callable[[], Source],
    max_bytes: int | None,
    progress: bool,
) -> tuple[Path, Record, int] | None:
    """The folder of the new copy, in the first of ``folders`` with room, its record, and a descriptor that holds it.

    ``None`` if the source has changed meanwhile, or what was left of an earlier attempt turned out to be damaged:
    nothing of it is left then, and another attempt begins anew.

    Raises:
        StagingError: it cannot be read, written, or is damaged. What was copied is kept for the next attempt, unless
            the disk is full.
    """
    part, file, record = _begin(folders, source, max_bytes)
    resumed = record.copied > 0
    try:
        with progress_bar(progress, f"staging {source.name}", source.bytes) as show:
            _copy(part, source, record, show)
        if source.bytes is None:  # only now it is known
            make_room(part.parent, part, whole_bytes=record.bytes, new_bytes=0, max_bytes=max_bytes)
        changed = look_again().identity != source.identity
        fault = None if changed else _read_back(part, record, resumed)
        if changed or (fault is not None and resumed):
            rank_zero_warn(f"Staging {source.shown} begins anew: {fault or 'it changed while it was copied'}.")
            remove_entry(part, force=True)
            os.close(file)
            return None
        if fault is not None:
            remove_entry(part, force=True)
            raise StagingError(f"The copy of {source.shown} is damaged, and so is the source, it seems: {fault}.")
        whole = _publish(part, record, file)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError) and not isinstance(error, StagingError):
            raise _failed(error, part, source) from error
        raise
    rank_zero_info(f"Staged {source.shown} to {whole}.")
    return whole, record, file


def copied_bytes(parts: list[Path], source: Source) -> int:
    """How much another process has copied so far, as the sizes of its files tell."""
    return bytes_on_disk(part / file.name for part in parts for file in source.files)


def fault_of(folder: Path, record: Record, *, read: bool) -> str | None:
    """What is wrong with a copy by size and time of its files, or, if they are to be read, by their checksums."""
    for file in record.files:
        path = folder / file.name
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                return f"{file.name} was changed after it was staged"
            if read and crc_of_file(path) != file.crc32:
                return f"the checksum of {file.name} does not match"
        except OSError as error:
            return f"{file.name} cannot be read ({error.strerror or error})"
    return None


@contextlib.contextmanager
def progress_bar(shown: bool, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """On the standard error stream; gives a function that takes how many bytes are done."""
    if not shown:
        yield _show_nothing
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _show_nothing(done: int) -> None:
    pass


def _begin(folders: list[Path], source: Source, max_bytes: int | None) -> tuple[Path, int, Record]:
    """Room in a folder, and what is there of the copy, held alone; a folder with a copy that broke off comes first."""
    faults: list[str] = []
    for root in sorted(folders, key=lambda root: not (root / f"{source.key}.part").exists()):
        part = root / f"{source.key}.part"
        try:
            make_folder(root)
            with exclusive_lock(root / ".space.lock", wait=True):
                for old in [entry for entry in entries_in(root) if entry.folder != part and not entry.is_whole]:
                    if old.record.source_id == source.source_id:  # it broke off, and its version is no more
                        remove_entry(old.folder)
                if (root / source.key).exists() and not remove_entry(root / source.key, force=True):
                    raise StagingError(f"{root / source.key} is in the way, as it is no staged copy: remove it.")
                record = read_record(part) or _new_record(source)
                there = copied_bytes([part], source)
                whole = source.bytes or 0
                make_room(root, part, whole_bytes=whole, new_bytes=max(0, whole - there), max_bytes=max_bytes)
                part.mkdir(exist_ok=True)
                file = lock_entry(part, alone=True)
                if file is None:
                    raise StagingError(f"{part} is in use by another process.")
                try:
                    write_record(part, record)
                except BaseException:
                    os.close(file)
                    raise
                return part, file, record
        except StagingError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{root} cannot be written ({error.strerror or error})")
    raise StagingError(" ".join(faults))


def _new_record(source: Source) -> Record:
    files = [CopiedFile(file.name, file.size) for file in source.files]
    return Record(source.shown, source.source_id, source.identity, source.is_folder, files)


def _copy(part: Path, source: Source, record: Record, show: Callable[[int], None]) -> None:
    done = 0

    def moved(size: int) -> None:
        nonlocal done
        done += size
        show(done)

    for file, state in zip(source.files, record.files, strict=True):
        path = part / file.name
        if state.mtime_ns and path.exists() and path.stat().st_size == state.size:
            moved(path.stat().st_size)  # it was complete before the copy broke off
        else:
            copy_file(file, path, state, save=lambda: write_record(part, record), moved=moved)


def _read_back(part: Path, record: Record, resumed: bool) -> str | None:
    """What is wrong with the finished copy."""
    for file in record.files:
        path = part / file.name
        sealed = has_seal(path)
        if sealed or file.name.endswith(".lmdb"):
            try:
                verify_lmdb(path)
            except StoreVersionError:
                pass  # a later version of the kit knows its checksums
            except StoreError as error:
                told = str(error).replace(str(path), file.name).rstrip(".")
                return told if sealed else f"{told}; what was got begins with {_first_bytes(path)!r}"
        elif resumed and crc_of_file(path) != file.crc32:
            return f"the checksum of {file.name} does not match"
    return None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SHOWN_BYTES)


def _publish(part: Path, record: Record, file: int) -> Path:
    """Give the copy its final name; from then on it is shared, and older versions of the source are removed."""
    whole = part.with_name(part.name.removesuffix(".part"))
    sync_folder(part)
    part.rename(whole)
    sync_folder(whole.parent)
    fcntl.flock(file, fcntl.LOCK_SH)
    for entry in entries_in(whole.parent):
        if entry.record.source_id == record.source_id and entry.folder != whole:
            remove_entry(entry.folder)
    return whole


def _failed(error: OSError, part: Path, source: Source) -> StagingError:
    if isinstance(error, ConnectionError):
        return StagingError(f"{source.shown}: {error}. What was copied is kept; another call goes on from there.")
    if error.errno not in _FULL:
        return StagingError(f"{part} could not be written ({error}). What was copied is kept; another call goes on.")
    needed = "" if source.bytes is None else f" {shown_bytes(source.bytes)} are needed,"
    copied = copied_bytes([part], source)
    remove_entry(part, force=True)  # a full disk is worse than a lost copy
    space = os.statvfs(part.parent)
    return StagingError(
        f"{part.parent} is full:{needed} {shown_bytes(copied)} were written, and were removed again; "
        f"{shown_bytes(space.f_bavail * space.f_frsize)} are free now. Free some space, or stage to another folder."
    )
