"""TFRecord files of ``tf.train.Example`` messages, read without TensorFlow, every checksum compared.

A sample is a dict by the names of the features. A feature with one value in the first record is that value (``bytes``,
``float`` or ``int``), one with several is an array of float32 or int64, or a list of ``bytes``. Where the number of
values differs from record to record, ``columns`` says which is meant: ``boxes:array`` is always an array, and
``caption:str`` is text.

A record is its length, a masked CRC-32C of the length, the data, and a masked CRC-32C of the data. Records are read
here and not by a package: the small readers that there are skip the checksums. The CRC itself is that of the ``crc32c``
package. Source: TensorFlow's ``record_writer.h`` and ``crc32c.h`` (the mask); RFC 3720 (CRC-32C).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_speedkit.data.sources.columns import Columns, chosen
from lightning_speedkit.data.sources.source import Item, Source, open_unzipped, unread_rest
from lightning_speedkit.data.sources.tfrecord_example import ExampleFault, Feature, parse_example
from lightning_speedkit.errors import MissingExtraError, SourceError

__all__ = ["TFRecordFiles", "masked_crc"]

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
_LARGEST = 1 << 31


class TFRecordFiles(Source):
    """The records of TFRecord files, plain or gzip, one file after the other.

    Args:
        paths: the files in their order.
        columns: the features to read, each with ``:array`` or ``:str`` where that is meant; by default all of the
            first record.

    Raises:
        SourceError: when it is counted or read: a file that is cut short or damaged in the length of a record, after
            which no record can be found.
        MissingExtraError: crc32c is not installed.
    """

    format = "tfrecord"
    read_in_threads = True

    def __init__(self, paths: Sequence[Path], *, columns: Columns | None = None) -> None:
        masked_crc(b"")
        self._paths = tuple(paths)
        self._chosen = columns
        self._count: int | None = None
        self._kinds: dict[str, str] | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = sum(1 for path in self._paths for _ in _records(path, contents=False))
        return self._count

    def items(self) -> Iterator[Item]:
        """One item per record. A record whose checksum does not match is a bad one, and the next one is read."""
        for path in self._paths:
            number = 0
            try:
                for number, (data, crc) in enumerate(_records(path, contents=True), start=1):
                    place = f"{path} record {number}"
                    if self._kinds is None and masked_crc(data) == crc:
                        self._kinds = self._kinds_of(place, data)
                    yield Item(place, self._reader(place, data, crc))
            except SourceError as error:
                yield unread_rest(f"{path} record {number + 1}", str(error).removeprefix(f"{path}: "), path)

    def _kinds_of(self, place: str, data: bytes) -> dict[str, str] | None:
        """For each feature to read: what its values become. Decided by the first record that can be read."""
        try:
            features = parse_example(data)
        except ExampleFault:
            return None  # reading the item says so
        columns = chosen(self._chosen, features, place, types=("array", "str"))
        return {name: kind or ("one" if len(features[name]) == 1 else "array") for name, kind in columns.items()}

    def _reader(self, place: str, data: bytes, crc: int) -> Callable[[], dict[str, Any]]:
        kinds = self._kinds

        def read() -> dict[str, Any]:
            if masked_crc(data) != crc:
                raise SourceError(f"{place}: the checksum of its data does not match; the file is damaged.")
            try:
                features = parse_example(data)
            except ExampleFault as fault:
                raise SourceError(f"{place}: {fault}.") from None
            assert kinds is not None
            return {name: _value(place, name, features.get(name), kind) for name, kind in kinds.items()}

        return read


def masked_crc(data: bytes) -> int:
    """The CRC-32C of some bytes, rotated and shifted as TFRecord files keep it."""
    try:
        from crc32c import crc32c
    except ImportError:
        raise MissingExtraError("reading TFRecord files", extra="pack", library="crc32c") from None
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _records(path: Path, *, contents: bool) -> Iterator[tuple[bytes, int]]:
    """The data and the masked CRC of each record; without ``contents`` the data is skipped."""
    try:
        with path.open("rb") if _is_record(path) else open_unzipped(path) as file:
            number = 0
            while head := file.read(_HEAD.size):
                number += 1
                where = f"{path}: record {number}"
                if len(head) < _HEAD.size:
                    raise SourceError(f"{where} ends inside its length; the file was cut short.")
                length, crc = _HEAD.unpack(head)
                if masked_crc(head[:8]) != crc:
                    raise SourceError(f"{where}: the checksum of its length does not match; what follows is lost.")
                if length > _LARGEST:
                    raise SourceError(f"{where} has {length} bytes; a tf.train.Example has at most 2 GiB.")
                if contents:
                    data, tail = file.read(length), file.read(_CRC.size)
                else:
                    file.seek(length, 1)  # beyond the end, too; the bytes after it tell
                    data, tail = b"", file.read(_CRC.size)
                if len(tail) < _CRC.size:
                    raise SourceError(f"{where} ends before its {length} bytes; the file was cut short.")
                yield data, _CRC.unpack(tail)[0]
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: cannot be read: {error}.") from error


def _is_record(path: Path) -> bool:
    """Whether it begins with a record, which for a length of 35615 starts as a gzip file does."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return len(head) == _HEAD.size and masked_crc(head[:8]) == _HEAD.unpack(head)[1]


def _value(place: str, name: str, feature: Feature | None, kind: str) -> Any:
    if feature is None:
        raise SourceError(f"{place}: it has no feature {name!r}, which the first record has.")
    if kind == "array":
        return feature
    if len(feature) != 1:
        raise SourceError(
            f"{place}: the feature {name!r} has {len(feature)} values and not one: choose {name}:array with --columns "
            f"to read it as an array."
        )
    value = feature[0]
    if kind == "str":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise SourceError(f"{place}: the feature {name!r} is not UTF-8 ({value[:40]!r}).") from None
    if isinstance(value, np.generic):
        return value.item()
    return value
