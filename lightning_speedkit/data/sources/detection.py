"""Which format a path is of, by its name, by what its first bytes say, and for a folder by what lies in it."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from pathlib import Path

from lightning_speedkit.data.sources.image_folder import SUFFIXES
from lightning_speedkit.data.sources.python_function import is_python_name
from lightning_speedkit.data.store.lmdb_format import has_seal
from lightning_speedkit.errors import SourceError

__all__ = ["FORMATS", "detect_format", "files_of"]

FORMATS = ("image-folder", "npy", "npz", "csv", "parquet", "webdataset", "tfrecord", "lmdb", "store", "python")
_NAMES = {
    "csv": re.compile(r"\.(csv|tsv)(\.gz)?$", re.I),
    "parquet": re.compile(r"\.(parquet|pq)$", re.I),
    "webdataset": re.compile(r"\.(tar|tar\.gz|tgz)$", re.I),
    "tfrecord": re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$", re.I),
    "npy": re.compile(r"\.npy$", re.I),
    "npz": re.compile(r"\.npz$", re.I),
}
_SHARDED = ("csv", "parquet", "webdataset", "tfrecord")
_BRACES = re.compile(r"\{(?P<choice>[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ALLOWED = (
    "a folder with one sub-folder of pictures per class, .npy, .npz, .csv, .tsv, .parquet, .tar (one, a folder of "
    "them, or shards-{000..012}.tar), .tfrecord, an LMDB database, a store, or module:function"
)


def detect_format(path: str) -> str:
    """The name of the format, one of :data:`FORMATS`.

    Raises:
        SourceError: there is nothing, or nothing that is known; it says what was seen and what is read.

    >>> detect_format("my_data:samples"), detect_format("shards-{000..003}.tar")
    ('python', 'webdataset')
    """
    if "://" in path:
        raise SourceError(f"{path} is an address: bring it to this machine first, as with stage_to_local.")
    if os.path.isdir(path):  # noqa: PTH112  # unlike Path.is_dir it also takes a name that is too long
        return _of_folder(Path(path))
    named = next((name for name, pattern in _NAMES.items() if pattern.search(path)), None)
    if os.path.isfile(path):  # noqa: PTH113
        return named or _of_bytes(Path(path))
    if is_python_name(path):
        return "python"
    if named in _SHARDED and _BRACES.search(path):
        return named
    raise SourceError(f"There is nothing at {path}.{_nearest(path)} A source is {_ALLOWED}.")


def files_of(path: str, format_name: str) -> list[Path]:
    """The files of a source that may be several: one, those of a folder by their names, or those of ``{000..012}``.

    Raises:
        SourceError: a file is missing, or the folder has none.
    """
    if os.path.isdir(path):  # noqa: PTH112
        pattern = _NAMES[format_name]
        entries = sorted(entry for entry in Path(path).iterdir() if not entry.name.startswith("."))
        files = [entry for entry in entries if pattern.search(entry.name) and entry.is_file()]
        if not files:
            raise SourceError(f"{path} holds no file of the format {format_name}, but {_seen(Path(path))}.")
        return files
    files = [Path(path)] if Path(path).exists() else [Path(name) for name in _expanded(path)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceError(f"There is no file {missing[0]}{more}.")
    return files


def _nearest(path: str) -> str:
    """For the message: the entry of the folder that is named most like it, or how far the path is there."""
    folder, name = Path(path).parent, Path(path).name
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return f" There is no folder {folder} either." if not os.path.isdir(folder) else ""  # noqa: PTH112
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {folder / near[0]}?" if near else ""


def _expanded(path: str) -> list[str]:
    """The names of a pattern with braces, as a shell expands them."""
    match = _BRACES.search(path)
    if match is None:
        return [path]
    choice = match["choice"]
    numbers = _RANGE.fullmatch(choice)
    if numbers is not None:
        first, last = numbers.groups()
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        words = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    else:
        words = choice.split(",")
    head, tail = path[: match.start()], path[match.end() :]
    return [name for word in words for name in _expanded(f"{head}{word}{tail}")]


def _of_bytes(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(512)
    if has_seal(path):
        return "store"
    if b"\xde\xc0\xef\xbe" in (head[16:20], head[24:28]):
        return "lmdb"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "webdataset"
    what = f"begins with {head[:16]!r}" if head else "is empty (0 bytes)"
    raise SourceError(
        f"{path} is of no format that is known by its name or its first bytes: it {what}. Name one with --format "
        f"({', '.join(FORMATS)}). A source is {_ALLOWED}."
    )


def _of_folder(path: Path) -> str:
    if (path / "data.mdb").is_file():
        return "lmdb"
    names = [entry.name for entry in os.scandir(path) if entry.is_file()]
    there = [name for name in _SHARDED if any(_NAMES[name].search(file) for file in names)]
    if len(there) == 1:
        return there[0]
    if not there and any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(path)):
        return "image-folder"
    if not there and any(os.path.splitext(name)[1].lower() in SUFFIXES for name in names):  # noqa: PTH122
        raise SourceError(
            f"The folder {path} holds {_seen(path)} and no folder for each class. If {path.name} is a class, give the "
            f"folder above it, {path.absolute().parent}; else move the pictures into a folder of their class."
        )
    raise SourceError(
        f"The folder {path} holds {_seen(path)}, so its format is not clear. A source is {_ALLOWED}. Name one with "
        f"--format ({', '.join(FORMATS)})."
    )


def _seen(path: Path) -> str:
    kinds: Counter[str] = Counter()
    for entry in os.scandir(path):
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122
        kind = "sub-folders" if entry.is_dir() else f"{suffix} files" if suffix else "files without a suffix"
        kinds["pictures" if suffix in SUFFIXES and not entry.is_dir() else kind] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(6)) or "nothing"
