"""What every format is read as: a source with items in a fixed order, each with a place that an error can name."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from lightning_speedkit.errors import SourceError

__all__ = ["Item", "Source", "UnreadRestError", "bad_item", "held_item", "open_unzipped", "unread_rest"]


@dataclass(frozen=True, slots=True)
class Item:
    """One sample that can be read: ``place`` names it in errors, ``read`` gives it, from any thread.

    >>> Item("row 3", lambda: {"age": 41}).read()
    {'age': 41}
    """

    place: str
    read: Callable[[], Any]


def bad_item(place: str, fault: str) -> Item:
    """An item that stands for a sample that cannot be read: reading it raises a :class:`SourceError`.

    >>> bad_item("people.csv row 3", "the column 'age' is empty").read()
    Traceback (most recent call last):
        ...
    lightning_speedkit.errors.SourceError: people.csv row 3: the column 'age' is empty
    """

    def read() -> NoReturn:
        raise SourceError(f"{place}: {fault}")

    return Item(place, read)


class UnreadRestError(SourceError):
    """The rest of ``file`` cannot be read, so that the samples in it are lost, and their number is not known."""

    def __init__(self, message: str, file: Path) -> None:
        super().__init__(message)
        self.file = file


def unread_rest(place: str, fault: str, file: Path) -> Item:
    """An item that stands for the rest of a file: reading it raises an :class:`UnreadRestError`.

    >>> unread_rest("a.tar, after the key '5'", "the shard has no end mark.", Path("a.tar")).read()
    Traceback (most recent call last):
        ...
    lightning_speedkit.data.sources.source.UnreadRestError: a.tar, after the key '5': the shard has no end mark.
    """

    def read() -> NoReturn:
        raise UnreadRestError(f"{place}: {fault}", file)

    return Item(place, read)


def held_item(place: str, sample: Any) -> Item:
    """An item whose sample is in memory already.

    >>> held_item("row 3", (1, 2)).read()
    (1, 2)
    """
    return Item(place, lambda: sample)


class Source(ABC):
    """Samples of one format in a fixed order, as an iterable with a length.

    A source can be iterated any number of times; each time is a new pass over the files, with the same samples in the
    same order.

    Attributes:
        format: the name of the format, such as ``"image-folder"``.
        classes: the names of the classes by their number, if the source knows them.
        read_in_threads: whether reading an item waits for the disk or computes outside Python, so that threads help.
    """

    format: str = ""
    classes: tuple[str, ...] = ()
    read_in_threads: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples, those that cannot be read included; ``TypeError`` if it is not known."""

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """The items in their order. What is wrong with one item is raised when that item is read."""

    def limited(self, count: int) -> Iterator[Item]:
        """At most ``count`` items: the first ones, unless a format has a better choice."""
        return islice(self.items(), count)

    def notes(self) -> tuple[str, ...]:
        """What a user should know of how this source is read, such as files that were left out."""
        return ()

    def __iter__(self) -> Iterator[Any]:
        for item in self.items():
            yield item.read()


def open_unzipped(path: Path) -> BinaryIO:
    """The file for reading; of a gzip file, known by its first bytes, what was compressed."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if zipped else path.open("rb")
