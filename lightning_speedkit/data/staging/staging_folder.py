"""Where staged copies go: the folder that was named, or the first local disk of this machine with room for them.

Network file systems are passed over, and memory (tmpfs) too, unless it is asked for by name: what it holds is missing
to everything else.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from lightning_speedkit.errors import StagingError
from lightning_speedkit.measure.file_system import read_file_system

__all__ = ["ENVIRONMENT_VARIABLE", "folders_for_staging", "make_folder"]

ENVIRONMENT_VARIABLE = "SPEEDKIT_CACHE"
_OF_THE_JOB = ("SLURM_TMPDIR", "JOBSCRATCH", "PBS_JOBFS", "_CONDOR_SCRATCH_DIR", "LOCAL_SCRATCH", "TMPDIR")
_OF_THE_NODE = ("/local*", "/mnt/local*", "/mnt/nvme*", "/nvme*", "/raid*", "/scratch*", "/mnt/resource", "/tmp")


def folders_for_staging(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that may take copies, best first; one alone if it was named. They are made when they are needed.

    The best are those of the batch job (``SLURM_TMPDIR``, ``TMPDIR`` and the like), then those of the node, of which
    disks that turn come last. In each of them it is a folder of this user.

    Raises:
        StagingError: the named folder cannot be written, or no candidate will do; it says why of each.
    """
    named, what = folder, "folder"
    if named is None:
        named, what = os.environ.get(ENVIRONMENT_VARIABLE) or None, f"the environment variable {ENVIRONMENT_VARIABLE}"
    if named is not None:
        place = Path(os.path.realpath(Path(named).expanduser()))
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StagingError(f"{place}, named by {what}, cannot be made: {error.strerror or error}.") from error
        if not os.access(place, os.W_OK | os.X_OK):
            raise StagingError(f"{place}, named by {what}, cannot be written by this user; name another.")
        return [place]
    usable, refused = [], []
    for candidate in _candidates():
        try:
            usable.append(_own_folder(candidate))
        except StagingError as error:
            refused.append(str(error))
    if not usable:
        reasons = "; ".join(refused) or "no candidate exists"
        raise StagingError(
            f"No local disk was found to stage to ({reasons}). Name one by folder or by {ENVIRONMENT_VARIABLE}."
        )
    return usable


def make_folder(folder: Path) -> None:
    """Make one of :func:`folders_for_staging`, private to this user, unless it is there.

    Raises:
        StagingError: it cannot be made, or somebody else has made it: /tmp is open to all.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StagingError(f"{folder} cannot be made: {error.strerror or error}") from error
    if folder.name == _own_name():
        _check_own(folder)


def _candidates() -> Iterator[Path]:
    seen = set()
    found = [Path(os.environ[name]) for name in _OF_THE_JOB if os.environ.get(name)]
    node = [Path(path) for pattern in _OF_THE_NODE for path in sorted(glob.glob(pattern))]  # noqa: PTH207
    node.append(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser())
    found += sorted(node, key=lambda path: read_file_system(path).rotational is True)
    for path in found:
        real = Path(os.path.realpath(path))
        if real not in seen and real.is_dir():
            seen.add(real)
            yield real


def _own_folder(parent: Path) -> Path:
    system = read_file_system(parent)
    if system.kind != "disk" and system.type:  # without a type it is no Linux, and nothing is known of any folder
        raise StagingError(f"{parent} is {system.describe()}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StagingError(f"{parent} cannot be written")
    folder = parent / _own_name()
    if os.path.lexists(folder):
        _check_own(folder)
    return folder


def _own_name() -> str:
    return f"speedkit-{os.getuid()}"


def _check_own(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StagingError(f"{folder} belongs to another user, or others can write it")
