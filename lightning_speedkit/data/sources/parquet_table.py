"""Parquet files: a row is a dict with the columns of the file.

``int64``, ``float64``, ``bool``, text and binary columns become ``int``, ``float``, ``bool``, ``str`` and ``bytes``; a
number of another width stays of that width, as a NumPy scalar. A list of numbers is a one-dimensional array. A struct
of ``bytes`` and ``path``, in which Hugging Face's datasets keep a picture, is the ``bytes`` of it. Everything else
(dates, decimals, maps, other structs, lists of lists) is refused with the name of the column.

A row with a null is a fault of that row, which is named, since a sample has no such thing as a missing value.

Needs pyarrow. Rows are read in batches, so the files may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightning_speedkit.data.sources.columns import Columns, chosen
from lightning_speedkit.data.sources.source import Item, Source, bad_item, held_item
from lightning_speedkit.errors import MissingExtraError, SourceError

__all__ = ["ParquetTable"]

_BATCH_ROWS = 1024
_NUMPY_NAMES = {"float": "float32", "halffloat": "float16"}


class ParquetTable(Source):
    """The rows of Parquet files of one schema, one file after the other.

    Args:
        paths: the files.
        columns: the columns to read; by default all of them.

    Raises:
        SourceError: not a Parquet file, a column of a type that is not stored or not there, or schemas that differ.
        MissingExtraError: pyarrow is not installed.
    """

    format = "parquet"

    def __init__(self, paths: Sequence[Path], *, columns: Columns | None = None) -> None:
        try:
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError("reading Parquet", extra="pack", library="pyarrow") from None
        self._paths = tuple(paths)
        schemas = []
        self._count = 0
        for path in self._paths:
            with _named(path), parquet.ParquetFile(path) as file:
                schemas.append(file.schema_arrow)
                self._count += file.metadata.num_rows
        where = str(self._paths[0])
        self._names = list(chosen(columns, schemas[0].names, where))
        types = {name: schemas[0].field(name).type for name in self._names}
        for path, schema in zip(self._paths, schemas, strict=True):
            for name, wanted in types.items():
                got = schema.field(name).type if name in schema.names else "not there"
                if got != wanted:
                    raise SourceError(f"{path}: the column {name!r} is {got}, in {where} it is {wanted}.")
        self._kinds = {name: _kind(kind, f"{where}: the column {name!r}") for name, kind in types.items()}

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[Item]:
        """One item per row; a row with a null is a bad one."""
        from pyarrow import parquet

        for path in self._paths:
            number = 1
            with _named(path), parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=self._names):
                    columns = [_values(batch.column(name), self._kinds[name]) for name in self._names]
                    for values in zip(*columns, strict=True):
                        yield self._item(f"{path} row {number}", values)
                        number += 1

    def _item(self, place: str, values: tuple[Any, ...]) -> Item:
        for name, value in zip(self._names, values, strict=True):
            if value is None:
                return bad_item(place, f"the column {name!r} is null.")
        return held_item(place, dict(zip(self._names, values, strict=True)))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of pyarrow as errors of a file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}.") from error


def _kind(arrow_type: Any, where: str) -> str:
    """``plain``, ``number``, ``list`` or ``picture``: how the values of a column become values of a sample."""
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type, where)
    if types.is_int64(arrow_type) or types.is_float64(arrow_type) or types.is_boolean(arrow_type):
        return "plain"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return "plain"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type) or types.is_fixed_size_binary(arrow_type):
        return "plain"
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return "number"
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type):
        inner = arrow_type.value_type
        if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
            return "list"
    if types.is_struct(arrow_type) and {field.name for field in arrow_type} == {"bytes", "path"}:
        return "picture"
    raise SourceError(
        f"{where} has the type {arrow_type}, which is not stored: leave it out with --columns, or convert it to "
        f"numbers, text, binary or a list of numbers."
    )


def _values(column: Any, kind: str) -> list[Any]:
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        column = column.dictionary_decode()
    if kind == "plain":
        values: list[Any] = column.to_pylist()
        return values
    if kind == "picture":
        return [None if value is None else value["bytes"] for value in column.to_pylist()]
    if kind == "list":
        return [_array(value) for value in column]
    scalar = np.dtype(_NUMPY_NAMES.get(str(column.type), str(column.type))).type
    return [None if value is None else scalar(value) for value in column.to_pylist()]


def _array(value: Any) -> Any:
    """A list of numbers as an array; ``None`` for a null, or a list with one in it."""
    if not value.is_valid or value.values.null_count:
        return None
    return value.values.to_numpy(zero_copy_only=False)
