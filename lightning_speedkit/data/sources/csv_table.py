"""CSV files: a row is a dict with the columns of the heading.

The type of a column is found from all of its rows, in a first pass that also counts them: ``int``, ``float``, ``bool``
(``true`` and ``false``) or, where none of these fits all rows, ``str``. A cell that is empty or says ``NA`` or ``null``
has no value: in a column of numbers that is a fault of its row, which is named, since a sample has no such thing as a
missing number; in a column of text it is that text. Digits too many for an ``int`` stay text.

Needs pyarrow. Rows are read in blocks, so the file may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_speedkit.data.sources.columns import Columns, chosen
from lightning_speedkit.data.sources.source import Item, Source, bad_item, held_item
from lightning_speedkit.errors import MissingExtraError, SourceError

__all__ = ["CsvTable"]

_EMPTY = ("", "NA", "N/A", "n/a", "#N/A", "null", "NULL", "Null", "None")
_TYPES = ("int", "float", "bool", "str")
_BLOCK_BYTES = 1 << 23


class CsvTable(Source):
    """The rows of CSV files of one heading, one file after the other.

    Args:
        paths: the files; with the suffix ``.tsv`` the cells are divided by tabs, else by commas, or by semicolons
            where the heading has them and no comma.
        columns: the columns to read and, where given, their types; by default all, with the types that are found.

    Raises:
        SourceError: no heading, a column twice, a column that is not there, or headings that differ.
        MissingExtraError: pyarrow is not installed.
    """

    format = "csv"

    def __init__(self, paths: Sequence[Path], *, columns: Columns | None = None) -> None:
        self._paths = tuple(paths)
        _arrow()
        self._delimiter = _delimiter(self._paths[0])
        self._names = self._heading(self._paths[0])
        for path in self._paths[1:]:
            if self._heading(path) != self._names:
                raise SourceError(f"{path} has another heading than {self._paths[0]}.")
        self._columns = chosen(columns, self._names, str(self._paths[0]), types=_TYPES)
        self._count: int | None = None
        self._types: dict[str, str] = {}

    def __len__(self) -> int:
        return self._look()

    def items(self) -> Iterator[Item]:
        """One item per row. A row that is malformed, not UTF-8, or without a number where one belongs is a bad one."""
        self._look()
        for path in self._paths:
            malformed: dict[int, str] = {}
            number = 1
            for batch in self._batches(path, malformed):
                columns = [_values(batch.column(name), name, self._types[name]) for name in self._columns]
                faults = {row: fault for _, found in columns for row, fault in found.items()}
                for row, values in enumerate(zip(*(column for column, _ in columns), strict=True)):
                    while number in malformed:
                        yield bad_item(f"{path} row {number}", malformed.pop(number))
                        number += 1
                    yield self._item(f"{path} row {number}", values, faults.get(row))
                    number += 1
            for left in sorted(malformed):
                yield bad_item(f"{path} row {left}", malformed[left])

    def notes(self) -> tuple[str, ...]:
        """The types that the columns have."""
        self._look()
        return ("columns: " + ", ".join(f"{name} {self._types[name]}" for name in self._columns),)

    def _item(self, place: str, values: tuple[Any, ...], fault: str | None) -> Item:
        if fault is not None:
            return bad_item(place, fault)
        return held_item(place, dict(zip(self._columns, values, strict=True)))

    def _look(self) -> int:
        """The first pass: find the type of each column, and count the rows."""
        if self._count is not None:
            return self._count
        fits = {name: set(_TYPES) for name, kind in self._columns.items() if not kind}
        count = 0
        for path in self._paths:
            malformed: dict[int, str] = {}
            for batch in self._batches(path, malformed):
                count += batch.num_rows
                for name in fits:
                    fits[name] &= _fitting(batch.column(name), fits[name])
            count += len(malformed)
        found = {name: next(kind for kind in _TYPES if kind in kinds) for name, kinds in fits.items()}
        self._types = {name: kind or found[name] for name, kind in self._columns.items()}
        self._count = count
        return count

    def _heading(self, path: Path) -> list[str]:
        import pyarrow

        try:
            names = list(self._open(path, [], {}).schema.names)
        except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{path} cannot be read as CSV: {error}.") from error
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SourceError(f"{path} has the column {twice[0]!r} twice: give each one its own name.")
        return names

    def _batches(self, path: Path, malformed: dict[int, str]) -> Iterator[Any]:
        import pyarrow

        try:
            yield from self._open(path, list(self._columns), malformed)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise SourceError(f"{path} cannot be read as CSV: {error}.") from error

    def _open(self, path: Path, names: list[str], malformed: dict[int, str]) -> Any:
        """A reader of record batches with the cells as bytes. Malformed rows are put down with their number."""
        import pyarrow
        from pyarrow import csv

        def note(row: Any) -> str:
            malformed[row.number - 1] = f"it has {row.actual_columns} cells, the heading has {row.expected_columns}."
            return "skip"

        return csv.open_csv(
            pyarrow.input_stream(str(path), compression="detect"),
            read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),  # threads lose the row numbers
            parse_options=csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=note
            ),
            convert_options=csv.ConvertOptions(
                include_columns=names, column_types=dict.fromkeys(names, pyarrow.binary())
            ),
        )


def _arrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtraError("reading CSV", extra="pack", library="pyarrow") from None


def _delimiter(path: Path) -> str:
    if ".tsv" in path.suffixes:
        return "\t"
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression="detect") as file:
            heading = file.read(1 << 16).partition(b"\n")[0]
    except OSError as error:
        raise SourceError(f"{path} cannot be read as CSV: {error}.") from error
    return ";" if b";" in heading and b"," not in heading else ","


def _arrow_type(kind: str) -> Any:
    import pyarrow

    return {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}[kind]


def _fitting(column: Any, kinds: set[str]) -> set[str]:
    """Those of the types that all values of this part of a column can be read as."""
    import pyarrow
    from pyarrow import compute

    fitting = {"str"}
    if len(kinds) == 1:
        return fitting
    try:
        text = compute.utf8_trim_whitespace(compute.cast(column, pyarrow.string()))
    except pyarrow.ArrowInvalid:  # not UTF-8, so not a number either; its row is found when it is read
        return fitting
    empty = compute.is_in(text, value_set=pyarrow.array(_EMPTY))
    text = text.filter(compute.invert(empty))
    for kind in kinds - {"str"}:
        try:
            compute.cast(text, _arrow_type(kind))
        except pyarrow.ArrowInvalid:
            continue
        fitting.add(kind)
    if "int" not in fitting and compute.any(compute.match_substring_regex(text, r"^[+-]?\d{16,}$")).as_py():
        fitting.discard("float")  # a float would change the last digits
    return fitting


def _values(column: Any, name: str, kind: str) -> tuple[list[Any], dict[int, str]]:
    """The values of a part of a column, and what is wrong with those that cannot be had, by their row in the part."""
    import pyarrow
    from pyarrow import compute

    try:
        text = compute.cast(column, pyarrow.string())
        if kind == "str":
            return text.to_pylist(), {}
        text = compute.utf8_trim_whitespace(text)
        empty = compute.is_in(text, value_set=pyarrow.array(_EMPTY))
        typed = compute.cast(compute.if_else(empty, None, text), _arrow_type(kind))
        return typed.to_pylist(), dict.fromkeys(_true_rows(empty), f"the column {name!r} is empty; it is {kind}.")
    except pyarrow.ArrowInvalid:
        return _one_by_one(column.to_pylist(), name, kind)


def _true_rows(mask: Any) -> list[int]:
    from pyarrow import compute

    rows: list[int] = compute.indices_nonzero(mask).to_pylist()
    return rows


def _one_by_one(cells: list[bytes], name: str, kind: str) -> tuple[list[Any], dict[int, str]]:
    import pyarrow
    from pyarrow import compute

    values: list[Any] = []
    faults: dict[int, str] = {}
    for row, cell in enumerate(cells):
        values.append(None)
        try:
            text = cell.decode()
            if kind == "str":
                values[row] = text
            elif text.strip() in _EMPTY:
                faults[row] = f"the column {name!r} is empty; it is {kind}."
            else:
                values[row] = compute.cast(pyarrow.scalar(text.strip()), _arrow_type(kind)).as_py()
        except UnicodeDecodeError:
            faults[row] = f"the column {name!r} is not UTF-8 ({cell[:40]!r}): convert the file, as with iconv."
        except pyarrow.ArrowInvalid:
            faults[row] = f"the column {name!r} is {text[:40]!r}, which is not of the type {kind}."
    return values, faults
