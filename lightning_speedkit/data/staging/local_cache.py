"""Copies a store to a local disk once per node, from a path or from any address that fsspec opens.

What it does: the first process of a node copies, the others wait for it and use the same copy, and so does every
later run, until the source changes. The copy is read back and checked before it appears under its final name. A copy
that broke off, also by ``kill -9``, goes on where it stopped. If space lacks, copies that were staged here before and
that no process uses are removed, those used longest ago first; nothing else is ever removed.

When it helps: data on a network file system or in an object store that is read in more than one epoch, or at random.
What it costs: the space on the local disk, and the time of one sequential read of the source.

Source: ``flock(2)`` and ``rename(2)``; RFC 9110 on range requests and entity tags.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_speedkit.data.staging.remote_source import find_remote
from lightning_speedkit.data.staging.staged_copy import copied_bytes, fault_of, make_copy, progress_bar
from lightning_speedkit.data.staging.staged_entries import entries_in, lock_entry, remove_entry
from lightning_speedkit.data.staging.staged_record import Record, read_record
from lightning_speedkit.data.staging.staging_folder import folders_for_staging, make_folder
from lightning_speedkit.data.staging.staging_source import Source, address_of, find_local, is_address, source_id
from lightning_speedkit.data.store.write_lock import exclusive_lock
from lightning_speedkit.errors import StagingError
from lightning_speedkit.measure.file_system import read_file_system

__all__ = ["release_staged", "stage_to_local"]

_WAIT_SECONDS = 0.2
_ATTEMPTS = 3  # at a source that changes while it is copied
_held: dict[Path, int] = {}
_held_lock = threading.Lock()


def stage_to_local(
    source: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    recheck: bool = False,
    progress: bool = False,
) -> Path:
    """The path of a copy of ``source`` on a local disk; it is made if there is none of this version yet.

    Any number of processes may call it at once. The copy is in use, and not removed to make room for others, until this
    process and its forked children end, or until :func:`release_staged`. Without ``folder``, a path that lies on a
    local disk or in memory is returned as it is; with it, a path inside of that folder.

    Args:
        source: a file, a folder of stores (its ``*.lmdb`` files are copied), or an address for fsspec: ``s3://``,
            ``gs://``, ``https://`` ... A folder cannot be staged over http. The names of the classes of a store, if it
            has any beside it (``train.classes.json`` of ``train.lmdb``), are copied with it.
        folder: where to; by default the folder in the environment variable ``SPEEDKIT_CACHE``, or else the first local
            disk with enough space among those of the batch job (``SLURM_TMPDIR``, ``TMPDIR`` ...) and of the node
            (``/local*``, ``/scratch*``, ``/tmp`` ..., the user's cache folder).
        max_bytes: how many bytes all copies in that folder may take together, such as ``10 * 10**9``; by default what
            is free.
        storage_options: for fsspec, such as credentials.
        recheck: read an older copy as a whole and compare its checksum, instead of size and time of its files alone.
        progress: show a progress bar on the standard error stream, also while another process copies.

    Raises:
        StagingError: there is no such source, it cannot be read, it is called ``*.lmdb`` and is no store, no folder
            will do, or space lacks.
        MissingExtraError: an address, and fsspec or aiohttp is not installed.
        ValueError, TypeError: a wrong argument, such as a protocol that fsspec does not know.

    Example::

        >>> import tempfile
        >>> from lightning_speedkit.data import LMDBDataset, stage_to_local, write_lmdb
        >>> far, near = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
        >>> path = write_lmdb([(i, i * i) for i in range(4)], f"{far.name}/train.lmdb")
        >>> copy = stage_to_local(path, folder=near.name)
        >>> copy.name, copy == stage_to_local(path, folder=near.name), LMDBDataset(copy)[3]
        ('train.lmdb', True, (3, 9))
    """
    address = address_of(source)
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise TypeError(f"max_bytes must be an int or None, got {max_bytes!r}; give it in bytes, such as 10 * 10**9.")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1 byte, got {max_bytes}.")
    if not is_address(address):
        real = os.path.realpath(address)
        if _is_near(real) if folder is None else Path(os.path.realpath(folder)) in Path(real).parents:
            _find(address, storage_options)  # which tells what is wrong with it
            return Path(address)
    folders = folders_for_staging(folder)
    system = read_file_system(folders[0])
    if system.is_network:
        rank_zero_warn(f"Copies are staged to {folders[0]}, which is not local: {system.describe()}.")
    try:
        for _ in range(_ATTEMPTS):
            found = _find(address, storage_options)
            path = _staged(folders, found, max_bytes, recheck, progress, lambda: _find(address, storage_options))
            if path is not None:
                return path
    except ConnectionError as error:
        return _last_known(folders, address, error)
    raise StagingError(f"{found.shown} changed or was damaged {_ATTEMPTS} times while it was copied; look at it first.")


def release_staged(path: str | os.PathLike[str]) -> None:
    """This process does not use a copy any more, so it may be removed when space lacks; other paths are ignored."""
    place = Path(os.path.realpath(path))
    with _held_lock:
        for folder in (place, place.parent):
            if folder in _held:
                os.close(_held.pop(folder))


def _find(address: str, storage_options: Mapping[str, Any] | None) -> Source:
    if is_address(address):
        return find_remote(address, storage_options or {})
    if storage_options:
        raise ValueError(
            f"storage_options are for addresses such as s3://..., and {address} is a path: leave them out."
        )
    return find_local(address)


def _is_near(path: str) -> bool:
    if not os.path.lexists(path):
        return False
    system = read_file_system(path)
    return system.kind in ("disk", "memory") or not system.type


def _staged(
    folders: list[Path],
    source: Source,
    max_bytes: int | None,
    recheck: bool,
    progress: bool,
    look_again: Callable[[], Source],
) -> Path | None:
    """The copy, found or made; ``None`` if the source has changed meanwhile."""
    there = _find_copy(folders, source.key, recheck, remove=False)
    if there is not None:
        return there
    make_folder(folders[0])
    with contextlib.ExitStack() as held:
        _take_turn(held, folders, source, progress)
        there = _find_copy(folders, source.key, recheck, remove=True)
        if there is not None:  # another process has made it meanwhile
            return there
        made = make_copy(folders, source, look_again=look_again, max_bytes=max_bytes, progress=progress)
        return None if made is None else _hold(*made)


def _take_turn(held: contextlib.ExitStack, folders: list[Path], source: Source, progress: bool) -> None:
    """Wait until no other process of this node makes the same copy, showing how far that is."""
    lock = folders[0] / f".{source.key}.lock"
    with contextlib.ExitStack() as waiting:
        show: Callable[[int], None] | None = None
        while True:
            try:
                held.enter_context(exclusive_lock(lock, wait=False))
                return
            except BlockingIOError:
                pass
            except OSError as error:
                raise StagingError(f"{folders[0]} cannot be locked ({error}); stage to a local disk.") from error
            if show is None:
                rank_zero_info(f"Another process is staging {source.shown}; waiting for it.")
                show = waiting.enter_context(progress_bar(progress, f"awaiting {source.name}", source.bytes))
            time.sleep(_WAIT_SECONDS)
            show(copied_bytes([root / f"{source.key}.part" for root in folders], source))


def _find_copy(folders: list[Path], key: str, recheck: bool, *, remove: bool) -> Path | None:
    """A copy without fault; one with a fault is removed, but only by who may make it anew."""
    for folder in (root / key for root in folders):
        file = lock_entry(folder, alone=False)
        if file is None:
            continue
        record = read_record(folder)
        fault = "its record is missing" if record is None else fault_of(folder, record, read=recheck)
        if record is not None and fault is None:
            return _hold(folder, record, file)
        os.close(file)
        if remove:
            rank_zero_warn(f"The staged copy {folder} is made anew: {fault}.")
            remove_entry(folder, force=True)
    return None


def _hold(folder: Path, record: Record, file: int) -> Path:
    """Keep the copy in use; the path that is handed out."""
    with _held_lock:
        before = _held.get(folder)
        _held[folder] = file
        if before is not None:
            os.close(before)
    return folder if record.is_folder else folder / record.files[0].name


def _last_known(folders: list[Path], address: str, error: ConnectionError) -> Path:
    """The source cannot be reached: the copy of it that was used last, with a warning."""
    entries = [entry for root in folders for entry in entries_in(root) if entry.is_whole]
    for entry in sorted(entries, key=lambda entry: -entry.last_used):
        if entry.record.source_id == source_id(address) and fault_of(entry.folder, entry.record, read=False) is None:
            file = lock_entry(entry.folder, alone=False)
            if file is not None:
                rank_zero_warn(f"{error}. The copy {entry.folder} is used, which may be older than the source.")
                return _hold(entry.folder, entry.record, file)
    raise StagingError(f"{error}. There is no earlier copy of it either.") from error
