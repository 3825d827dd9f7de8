"""Opens a source of samples of any known format, and finds the splits that a folder is divided into."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_speedkit.data.sources.columns import Columns, parse_columns
from lightning_speedkit.data.sources.csv_table import CsvTable
from lightning_speedkit.data.sources.detection import FORMATS, detect_format, files_of
from lightning_speedkit.data.sources.foreign_lmdb import ForeignLmdb
from lightning_speedkit.data.sources.image_check import CHECKS
from lightning_speedkit.data.sources.image_folder import SUFFIXES, ImageFolder, class_folders
from lightning_speedkit.data.sources.numpy_arrays import NumpyFile, NumpyZip
from lightning_speedkit.data.sources.packed_store import PackedStore
from lightning_speedkit.data.sources.parquet_table import ParquetTable
from lightning_speedkit.data.sources.python_function import PythonFunction
from lightning_speedkit.data.sources.source import Source
from lightning_speedkit.data.sources.split_choice import SPLIT_NAMES
from lightning_speedkit.data.sources.tfrecord_files import TFRecordFiles
from lightning_speedkit.data.sources.webdataset_shards import WebDatasetShards
from lightning_speedkit.errors import SourceError

__all__ = ["classes_of", "find_splits", "open_source"]

_WITH_COLUMNS = ("npz", "csv", "parquet", "webdataset", "tfrecord")
_WITH_CHECK = ("image-folder", "webdataset")


def open_source(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    columns: str | Sequence[str] | None = None,
    check: str | None = None,
    trust_pickle: bool = False,
    classes: Sequence[str] | None = None,
) -> Source:
    """The samples at a path: an iterable with a length, which :func:`~lightning_speedkit.data.write_lmdb` can pack.

    Args:
        path: a file, a folder, shards such as ``"data-{000..012}.tar"``, or ``"module:function"``.
        format: ``image-folder``, ``npy``, ``npz``, ``csv``, ``parquet``, ``webdataset``, ``tfrecord``, ``lmdb``,
            ``store`` or ``python``; by default found from the path and what lies there.
        columns: what to read of ``npz``, ``csv``, ``parquet``, ``webdataset`` or ``tfrecord``, in this order: names,
            each with an optional type, as ``"age,zip:str"`` or a list. By default everything.
        check: how closely the pictures of an image folder or of shards are looked at: ``"quick"`` (the default), the
            first and last bytes; ``"full"``, by decoding them; ``"none"``.
        trust_pickle: load the pickles of an LMDB database, whatever code that runs.
        classes: the names of the classes of an image folder in their order; by default its sub-folders.

    Raises:
        SourceError: nothing there, an unknown or damaged format, or options that do not fit what is there.
        MissingExtraError: the format needs a library that is not installed.
        ValueError: an option that this format cannot heed.

    Example::

        >>> import tempfile, numpy
        >>> folder = tempfile.TemporaryDirectory()
        >>> numpy.save(f"{folder.name}/x.npy", numpy.arange(6, dtype="int32").reshape(3, 2))
        >>> source = open_source(f"{folder.name}/x.npy")
        >>> len(source), [row.tolist() for row in source]
        (3, [[0, 1], [2, 3], [4, 5]])
    """
    name = os.fspath(path)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}.")
    if check is not None and check not in CHECKS:
        raise ValueError(f"check must be one of {', '.join(CHECKS)}, got {check!r}.")
    kind = detect_format(name) if format is None else format
    if kind != "python" and not os.path.lexists(name) and "{" not in name:
        raise SourceError(f"There is nothing at {name}.")
    _check_heeded(kind, columns=columns, check=check, trust_pickle=trust_pickle, classes=classes)
    parsed = parse_columns(columns)
    if kind == "image-folder":
        return _image_folder(Path(name), classes, check or "quick")
    return _opener(kind, name, parsed, check or "quick", trust_pickle)()


def find_splits(path: str | os.PathLike[str]) -> dict[str, Path]:
    """The splits of a folder whose sub-folders are all named as splits: train, val (valid, validation), test, predict.

    Empty if the path is no such folder, or if those sub-folders hold pictures themselves, so that they are classes.

    >>> import tempfile, pathlib
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name in ("train/cat", "train/dog", "valid/cat"):
    ...     pathlib.Path(folder.name, name).mkdir(parents=True)
    >>> list(find_splits(folder.name))
    ['train', 'val']
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # noqa: PTH112
        return {}
    names = class_folders(folder)
    if not names or any(name.lower() not in SPLIT_NAMES for name in names):
        return {}
    if any(_is_class(folder / name) for name in names):
        return {}
    splits: dict[str, Path] = {}
    for name in names:
        split = SPLIT_NAMES[name.lower()]
        if split in splits:
            raise SourceError(f"{folder} has two folders for the split {split}: {splits[split].name} and {name}.")
        splits[split] = folder / name
    return dict(sorted(splits.items(), key=lambda pair: list(SPLIT_NAMES.values()).index(pair[0])))


def classes_of(splits: dict[str, Path]) -> tuple[str, ...]:
    """The names of the classes of all splits of an image folder together, so that a class has one number in all."""
    return tuple(sorted({name for folder in splits.values() for name in class_folders(folder)}))


def _is_class(folder: Path) -> bool:
    """Whether the folder holds pictures beside no folders, as that of a class does."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return not any(entry.is_dir() for entry in entries) and any(entry.suffix.lower() in SUFFIXES for entry in entries)


def _image_folder(path: Path, classes: Sequence[str] | None, check: str) -> Source:
    splits = find_splits(path)
    if splits:
        raise SourceError(
            f"{path} holds the splits {', '.join(splits)}: give one of its folders, or pack it into a folder, which "
            f"gets one store for each of them."
        )
    return ImageFolder(path, classes=classes, check=check)


def _check_heeded(kind: str, *, columns: object, check: object, trust_pickle: bool, classes: object) -> None:
    for name, given, heeding in (
        ("columns", columns is not None, _WITH_COLUMNS),
        ("check", check not in (None, "none"), _WITH_CHECK),
        ("trust_pickle", trust_pickle, ("lmdb",)),
        ("classes", classes is not None, ("image-folder",)),
    ):
        if given and kind not in heeding:
            raise ValueError(f"{name} has no effect on the format {kind}, only on {', '.join(heeding)}.")


def _opener(kind: str, name: str, columns: Columns | None, check: str, trust_pickle: bool) -> Callable[[], Source]:
    openers: dict[str, Callable[[], Source]] = {
        "npy": lambda: NumpyFile(Path(name)),
        "npz": lambda: NumpyZip(Path(name), columns=columns),
        "csv": lambda: CsvTable(files_of(name, kind), columns=columns),
        "parquet": lambda: ParquetTable(files_of(name, kind), columns=columns),
        "webdataset": lambda: WebDatasetShards(files_of(name, kind), columns=columns, check=check),
        "tfrecord": lambda: TFRecordFiles(files_of(name, kind), columns=columns),
        "lmdb": lambda: ForeignLmdb(Path(name), trust_pickle=trust_pickle),
        "store": lambda: PackedStore(Path(name)),
        "python": lambda: PythonFunction(name),
    }
    return openers[kind]
