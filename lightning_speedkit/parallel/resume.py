"""Where a run that is started again goes on: the newest checkpoint of a folder that is complete.

What it does: Lightning's ``ckpt_path="last"`` needs ``ModelCheckpoint(save_last=True)`` and does not look at what is in
the file. This one takes the newest of all checkpoints in the folder, whoever wrote them, and passes over one that is
torn: Lightning writes a checkpoint elsewhere and moves it, which is a copy if the folder lies on another disk than
``/tmp``, and a copy can end in the middle. What it costs: a look at the end of each file.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zipfile
from pathlib import Path

__all__ = ["newest_checkpoint", "publish_checkpoint"]


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint in ``folder`` that was written last, for ``trainer.fit(..., ckpt_path=...)``.

    Args:
        folder: Of this machine, or one that all machines share. It need not exist.

    Returns:
        The path, or ``None`` if there is none: the run begins anew.

    Warns:
        UserWarning: A file named ``*.ckpt`` is no complete checkpoint and is passed over.

    Example:

        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(newest_checkpoint(folder))
        ...     torch.save({"epoch": 3}, f"{folder}/epoch=3.ckpt")
        ...     print(Path(newest_checkpoint(folder)).name)
        None
        epoch=3.ckpt
    """
    found = [path for path in Path(folder).glob("*.ckpt") if not path.name.startswith(".")]
    for path in sorted(found, key=_written, reverse=True):
        if _is_complete(path):
            return str(path)
        warnings.warn(f"{path} is not a complete checkpoint and is passed over.", stacklevel=2)
    return None


def publish_checkpoint(part: Path, name: Path) -> None:
    """Give a checkpoint that is complete its name, in the same folder; what had the name is there until then.

    Args:
        part: The file that was written, or a folder, if the strategy writes one file per rank.
        name: What it is to be called.
    """
    if part.is_file():
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # the machine may be gone in a moment
        if not name.is_dir():
            part.replace(name)
            return
    before = name.with_name(f".{name.name}.before")  # a folder is not replaced at once
    shutil.rmtree(before, ignore_errors=True)
    before.unlink(missing_ok=True)
    if name.exists():
        name.replace(before)
    part.replace(name)
    if before.is_dir():
        shutil.rmtree(before, ignore_errors=True)
    else:
        before.unlink(missing_ok=True)


def _written(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, path.name
    except FileNotFoundError:  # another process has just put a newer one in its place, or removed it
        return 0, path.name


def _is_complete(path: Path) -> bool:
    if path.is_dir():  # one file per rank, and what is written last tells which
        return (path / ".metadata").exists()
    return zipfile.is_zipfile(path)  # its table is at the end
