"""The record of a staged copy: what it is a copy of, and how far each file is; a small JSON file beside the files."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RECORD_FILES", "CopiedFile", "Record", "read_record", "write_record"]

_NAME, _TEMPORARY = ".staged.json", ".staged.json.tmp"
RECORD_FILES = (_TEMPORARY, _NAME)
"""All that writing a record may leave in the folder of a copy."""

_SCHEMA = "speedkit-staged"


@dataclass(slots=True)
class CopiedFile:
    """How far one file is: ``copied`` bytes are on the disk, ``crc32`` is of those; ``mtime_ns`` is set at the end."""

    name: str
    size: int | None
    copied: int = 0
    crc32: int = 0
    mtime_ns: int = 0


@dataclass(slots=True)
class Record:
    """What a copy is of. ``source`` is for people; ``identity`` tells source and version."""

    source: str
    source_id: str
    identity: str
    is_folder: bool
    files: list[CopiedFile]

    @property
    def bytes(self) -> int:
        """Of all files when they are complete, as far as it is known."""
        return sum(file.copied if file.size is None else file.size for file in self.files)

    @property
    def copied(self) -> int:
        """Of all files until now."""
        return sum(file.copied for file in self.files)


def read_record(folder: Path) -> Record | None:
    """The record of a copy; ``None`` if there is none that can be read."""
    try:
        content = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        if content.pop("schema") != _SCHEMA:
            return None
        files = [CopiedFile(**file) for file in content.pop("files")]
        record = Record(**content, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    plain = all(isinstance(file.name, str) and file.name == os.path.basename(file.name) for file in files)  # noqa: PTH119
    return record if plain and not any(file.name in ("", ".", "..") for file in files) else None


def write_record(folder: Path, record: Record) -> None:
    """Replace the record at once."""
    temporary = folder / _TEMPORARY
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({"schema": _SCHEMA, **dataclasses.asdict(record)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / _NAME)
