"""Parquet files that pyarrow wrote: types, nulls and refusals."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.sources.parquet_table import ParquetTable
from lightning_speedkit.errors import SourceError


def table(name: str = "t.parquet", **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), name, row_group_size=3)
    return Path(name)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, -2], pa.int64()), [1, -2]),
        (pa.array([0.5, 2], pa.float64()), [0.5, 2.0]),
        (pa.array([True, False]), [True, False]),
        (pa.array(["a", "é"]), ["a", "é"]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["a", "a"]).dictionary_encode(), ["a", "a"]),
        (pa.array([b"\0\xff", b""]), [b"\0\xff", b""]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), [b"ab", b"cd"]),
        (pa.array([1, 255], pa.uint8()), [np.uint8(1), np.uint8(255)]),
        (pa.array([1, 2**64 - 1], pa.uint64()), [np.uint64(1), np.uint64(2**64 - 1)]),
        (pa.array([0.1, 2], pa.float32()), [np.float32(0.1), np.float32(2)]),
        (pa.array([np.float16(0.5), np.float16(2)], pa.float16()), [np.float16(0.5), np.float16(2)]),
    ],
)
def test_columns_keep_their_values_and_types(column: Any, values: list[Any]) -> None:
    got = [sample["x"] for sample in ParquetTable([table(x=column)])]
    assert got == values
    assert [type(value) for value in got] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(pa.list_(pa.float32()), "float32"), (pa.large_list(pa.int16()), "int16"), (pa.list_(pa.bool_(), 2), "bool")],
)
def test_lists_of_numbers_are_arrays(kind: pa.DataType, dtype: str) -> None:
    one, none = (True, False) if dtype == "bool" else (1, 0)
    rows = [[one, none], [none, one], [one, one], [none, none]]
    got = [sample["x"] for sample in ParquetTable([table(x=pa.array(rows, kind))])]
    assert [array.tolist() for array in got] == rows
    assert {array.dtype for array in got} == {np.dtype(dtype)}
    varying = [sample["x"].tolist() for sample in ParquetTable([table(x=pa.array([[], [1], [2, 3]]))])]
    assert varying == [[], [1], [2, 3]]


def test_the_picture_of_a_struct_is_its_bytes() -> None:
    column = pa.array([{"bytes": b"one", "path": "a.jpg"}, {"bytes": b"two", "path": None}])
    assert [sample["image"] for sample in ParquetTable([table(image=column)])] == [b"one", b"two"]


def test_samples_come_back_from_a_store_as_they_were() -> None:
    path = table(n=pa.array(range(10)), v=pa.array([[i / 2] * 3 for i in range(10)], pa.list_(pa.float32(), 3)))
    samples = LMDBDataset(write_lmdb(ParquetTable([path]), "t.lmdb"))
    assert [(sample["n"], sample["v"].tolist()) for sample in samples] == [(i, [i / 2] * 3) for i in range(10)]


def test_nulls_name_row_and_column() -> None:
    source = ParquetTable([table(a=pa.array([1, 2, 3, None]), b=pa.array(["x", None, "z", "w"]))])
    items = list(source.items())
    assert items[0].read() == {"a": 1, "b": "x"}
    with pytest.raises(SourceError, match=r"^t\.parquet row 2: the column 'b' is null\.$"):
        items[1].read()
    with pytest.raises(SourceError, match=r"^t\.parquet row 4: the column 'a' is null\.$"):
        items[3].read()
    with pytest.raises(SourceError, match="the column 'x' is null"):
        list(ParquetTable([table(x=pa.array([[1, None]]))]))
    assert len(source) == 4


@pytest.mark.parametrize(
    "values",
    [
        [datetime.datetime(2024, 1, 1)],
        [datetime.date(2024, 1, 1)],
        [decimal.Decimal("1.5")],
        [{"a": 1}],
        [[[1]]],
        [["text"]],
        [None],
    ],
)
def test_other_types_are_refused_with_the_column(values: list[Any]) -> None:
    path = table(good=pa.array([1]), odd=pa.array(values))
    with pytest.raises(SourceError, match=r"t\.parquet: the column 'odd' has the type .*, which is not stored"):
        ParquetTable([path])
    assert list(ParquetTable([path], columns={"good": ""})) == [{"good": 1}]


def test_several_files_follow_one_another_and_must_agree() -> None:
    paths = [table("a.parquet", x=[1, 2], y=[0, 0]), table("b.parquet", y=[5], x=[3])]
    source = ParquetTable(paths)
    assert list(source) == [{"x": 1, "y": 0}, {"x": 2, "y": 0}, {"x": 3, "y": 5}]
    assert len(source) == 3
    with pytest.raises(SourceError, match=r"c\.parquet: the column 'x' is string, in a\.parquet it is int64"):
        ParquetTable([*paths, table("c.parquet", x=["1"], y=[1])])
    with pytest.raises(SourceError, match=r"d\.parquet: the column 'y' is not there"):
        ParquetTable([*paths, table("d.parquet", x=[1])])


def test_damaged_files_are_named() -> None:
    whole = table(x=list(range(100))).read_bytes()
    for name, content in (("cut.parquet", whole[:-20]), ("none.parquet", b""), ("text.parquet", b"x,y\n1,2\n")):
        Path(name).write_bytes(content)
        with pytest.raises(SourceError, match=f"{name} cannot be read as Parquet"):
            ParquetTable([Path(name)])
    with pytest.raises(SourceError, match="nowhere"):
        ParquetTable([Path("nowhere.parquet")])
