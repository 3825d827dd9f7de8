"""A tree of pictures with one folder per class, as torchvision's ``ImageFolder`` reads it.

A sample is ``(bytes of the file, number of the class)``: the encoded picture as it is, and the place of its folder in
the alphabetical order of the folders. Pictures may lie in folders below the class folder. The order of the samples is
that of the classes, and within a class that of the names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_speedkit.data.sources.image_check import check_image
from lightning_speedkit.data.sources.source import Item, Source
from lightning_speedkit.errors import SourceError

__all__ = ["SUFFIXES", "ImageFolder", "class_folders"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


class ImageFolder(Source):
    """The pictures under the folders of ``path``.

    Args:
        path: the folder whose sub-folders are the classes.
        classes: the names of the classes in their order, if other folders than these decide it (the other splits).
        check: how closely each picture is looked at: ``"quick"``, ``"full"`` or ``"none"``.

    Raises:
        SourceError: there are no pictures, or some lie outside the class folders.
    """

    format = "image-folder"
    read_in_threads = True

    def __init__(self, path: Path, *, classes: Sequence[str] | None = None, check: str = "quick") -> None:
        self.path = path
        self._check = check
        self._ignored: Counter[str] = Counter()
        own = class_folders(path)
        self.classes = tuple(own if classes is None else classes)
        loose = next((entry.name for entry in _entries(path) if _is_picture(entry)), None)
        if not own or loose is not None:
            what = f"the picture {loose} lies beside them" if own else "there is none"
            raise SourceError(
                f"{path} is read as pictures with one sub-folder per class, but {what}. Move every picture into the "
                f"folder of its class, or write a function that yields the samples and give it as module:function."
            )
        self._files = [(file, number) for number, name in enumerate(self.classes) for file in self._pictures(name)]
        if not self._files:
            raise SourceError(f"{path} holds no picture in its sub-folders ({', '.join(sorted(SUFFIXES))}).")
        counts = Counter(number for _, number in self._files)
        self._empty = [name for number, name in enumerate(self.classes) if not counts[number]]

    def __len__(self) -> int:
        return len(self._files)

    def items(self) -> Iterator[Item]:
        """One item per picture."""
        return map(self._item, self._files)

    def limited(self, count: int) -> Iterator[Item]:
        """``count`` pictures spread evenly, so that every class has its share."""
        total = len(self._files)
        if count >= total:
            return self.items()
        return (self._item(self._files[i * total // count]) for i in range(count))

    def notes(self) -> tuple[str, ...]:
        """Files that are no pictures, and classes without one."""
        notes = []
        if self._ignored:
            kinds = ", ".join(
                f"{count} {suffix or 'without a suffix'}" for suffix, count in self._ignored.most_common(5)
            )
            notes.append(f"files that are no pictures were left out: {kinds}")
        if self._empty:
            notes.append(f"classes without a picture: {', '.join(self._empty[:10])}")
        return tuple(notes)

    def _item(self, entry: tuple[str, int]) -> Item:
        file, number = entry
        return Item(file, _reader(file, number, self._check))

    def _pictures(self, name: str) -> list[str]:
        found: list[str] = []
        seen: set[tuple[int, int]] = set()
        if not (self.path / name).is_dir():
            return found  # a class that only another split has
        for folder, folders, files in os.walk(self.path / name, onerror=_not_listed, followlinks=True):
            status = os.stat(folder)  # noqa: PTH116  # a str, as os.walk gives it
            if (status.st_dev, status.st_ino) in seen:  # a link that leads back to a folder above
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = [below for below in folders if not below.startswith(".")]
            for file in files:
                suffix = os.path.splitext(file)[1].lower()  # noqa: PTH122
                if file.startswith("."):
                    continue
                if suffix in SUFFIXES:
                    found.append(f"{folder}/{file}")
                else:
                    self._ignored[suffix] += 1
        return sorted(found)


def class_folders(path: Path) -> list[str]:
    """The names of the sub-folders in alphabetical order, without hidden ones."""
    return sorted(entry.name for entry in _entries(path) if entry.is_dir())


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        _not_listed(error)


def _not_listed(error: OSError) -> NoReturn:
    raise SourceError(f"{error.filename} cannot be listed: {error.strerror}.") from error


def _is_picture(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()  # noqa: PTH122


def _reader(file: str, number: int, check: str) -> Callable[[], tuple[bytes, int]]:
    def read() -> tuple[bytes, int]:
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise SourceError(f"{file}: cannot be read: {error.strerror}.") from error
        check_image(data, file, check)
        return data, number

    return read
