"""CSV files: the types that are found, the faults of rows, and the order; against Python's own csv module."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.data.sources import csv_table
from lightning_speedkit.data.sources.csv_table import CsvTable
from lightning_speedkit.errors import SourceError


def table(text: str | bytes, name: str = "t.csv", columns: dict[str, str] | None = None) -> CsvTable:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return CsvTable([Path(name)], columns=columns)


def faults(source: CsvTable) -> tuple[list[Any], list[str]]:
    good, bad = [], []
    for item in source.items():
        try:
            good.append(item.read())
        except SourceError as error:
            bad.append((item.place, str(error)))
    assert all(text.startswith(f"{place}: ") for place, text in bad)
    return good, [text for _, text in bad]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2", " 3 "], [1, -2, 3]),
        (["1", "2.5", "1e3"], [1.0, 2.5, 1000.0]),
        (["true", "False", "TRUE"], [True, False, True]),
        (["1", "x", ""], ["1", "x", ""]),
        (["NA", "Namibia", ""], ["NA", "Namibia", ""]),
        (["1", "0", "1"], [1, 0, 1]),
        (["12345678901234567890", "1", "2"], ["12345678901234567890", "1", "2"]),
        (["9223372036854775807", "1", "2"], [2**63 - 1, 1, 2]),
        (["0.1", "inf", "-inf"], [0.1, float("inf"), float("-inf")]),
        (["2024-01-02", "2024-01-03", "x"], ["2024-01-02", "2024-01-03", "x"]),
        (['"a,b"', '"say ""hi"""', '"two\nlines"'], ["a,b", 'say "hi"', "two\nlines"]),
    ],
)
def test_a_column_has_the_first_type_that_all_rows_fit(cells: list[str], values: list[Any]) -> None:
    source = table("x,other\n" + "".join(f"{cell},k\n" for cell in cells))
    got = [sample["x"] for sample in source]
    assert got == values
    assert [type(value) for value in got] == [type(value) for value in values]
    assert len(source) == 3


def test_a_late_value_decides_the_type_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "_BLOCK_BYTES", 512)
    rows = 500
    source = table("a,b\n" + "".join(f"{i},{i}\n" for i in range(rows)) + "0.5,word\n")
    samples = list(source)
    assert samples[7] == {"a": 7.0, "b": "7"}
    assert type(samples[7]["a"]) is float
    assert source.notes() == ("columns: a float, b str",)
    assert len(samples) == len(source) == rows + 1


def test_random_tables_are_read_as_by_the_csv_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "_BLOCK_BYTES", 1024)
    draw = random.Random(0)
    letters = 'ab ,"\n;é犬'
    rows = [
        [str(i), *("".join(draw.choices(letters, k=draw.randrange(9))) + "." for _ in range(3))] for i in range(300)
    ]
    with Path("t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["n", "a", "b", "c d"], *rows])
    expected = [{"n": int(n), "a": a, "b": b, "c d": c} for n, a, b, c in rows]
    assert list(CsvTable([Path("t.csv")])) == expected


def test_faults_name_row_and_column_and_leave_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "_BLOCK_BYTES", 64)
    source = table(b"age,name\n1,a\n2\n,c\n4,d\n5,\xff\xfe\n6,f,g\nnull,h\n8,i\n9\n")
    good, bad = faults(source)
    assert good == [{"age": 1, "name": "a"}, {"age": 4, "name": "d"}, {"age": 8, "name": "i"}]
    assert bad == [
        "t.csv row 2: it has 1 cells, the heading has 2.",
        "t.csv row 3: the column 'age' is empty; it is int.",
        "t.csv row 5: the column 'name' is not UTF-8 (b'\\xff\\xfe'): convert the file, as with iconv.",
        "t.csv row 6: it has 3 cells, the heading has 2.",
        "t.csv row 7: the column 'age' is empty; it is int.",
        "t.csv row 9: it has 1 cells, the heading has 2.",
    ]
    assert len(source) == len(good) + len(bad)


def test_types_can_be_given_and_a_value_that_does_not_fit_is_a_fault() -> None:
    source = table("zip,x,y\n01234,1,1\n00042,2.5,true\n", columns={"y": "bool", "zip": "str", "x": "int"})
    good, bad = faults(source)
    assert good == [{"y": True, "zip": "01234", "x": 1}]
    assert list(good[0]) == ["y", "zip", "x"]
    assert bad == ["t.csv row 2: the column 'x' is '2.5', which is not of the type int."]


@pytest.mark.parametrize(("name", "mark"), [("t.csv", ","), ("t.csv", ";"), ("t.tsv", "\t"), ("t.tsv.gz", "\t")])
def test_tabs_semicolons_and_gzip(name: str, mark: str) -> None:
    text = f"a{mark}b\n1{mark}x;y z\n".replace("x;y", "x;y" if mark != ";" else "x").encode()
    source = table(gzip.compress(text) if name.endswith("gz") else text, name)
    assert list(source) == [{"a": 1, "b": "x;y z" if mark != ";" else "x z"}]


def test_several_files_follow_one_another_and_must_agree() -> None:
    Path("a.csv").write_text("x\n1\n2\n")
    Path("b.csv").write_text("x\n2.5\n")
    Path("c.csv").write_text("y\n2.5\n")
    source = CsvTable([Path("a.csv"), Path("b.csv")])
    assert list(source) == [{"x": 1.0}, {"x": 2.0}, {"x": 2.5}]
    assert [item.place for item in source.items()] == ["a.csv row 1", "a.csv row 2", "b.csv row 1"]
    with pytest.raises(SourceError, match=r"c\.csv has another heading than a\.csv"):
        CsvTable([Path("a.csv"), Path("c.csv")])


def test_a_byte_order_mark_is_no_part_of_the_heading() -> None:
    assert list(table(b"\xef\xbb\xbfa,b\n1,2\n")) == [{"a": 1, "b": 2}]


def test_files_without_a_heading_to_use_are_refused() -> None:
    with pytest.raises(SourceError, match=r"t\.csv cannot be read as CSV: Empty CSV file"):
        table("")
    with pytest.raises(SourceError, match="the column 'a' twice"):
        table("a,b,a\n1,2,3\n")
    with pytest.raises(SourceError, match="has no 'c'"):
        table("a,b\n1,2\n", columns={"c": ""})
    with pytest.raises(SourceError, match="cannot be read as CSV"):
        CsvTable([Path("nowhere.csv")])
    assert list(table("a,b\n")) == []
