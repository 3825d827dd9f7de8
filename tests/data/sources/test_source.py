"""Items and the iteration of a source."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.sources.source import Item, Source, bad_item, held_item, open_unzipped
from lightning_speedkit.errors import SourceError


class Three(Source):
    format = "three"

    def __len__(self) -> int:
        return 3

    def items(self) -> Iterator[Item]:
        return (held_item(f"item {i}", (i, str(i))) for i in range(3))


def test_a_source_is_an_iterable_with_a_length_that_can_be_read_twice() -> None:
    source = Three()
    assert (len(source), list(source), list(source)) == (3, [(0, "0"), (1, "1"), (2, "2")], list(source))
    assert [item.read() for item in source.limited(2)] == [(0, "0"), (1, "1")]
    assert source.notes() == ()


def test_write_lmdb_takes_a_source() -> None:
    assert list(LMDBDataset(write_lmdb(Three(), "three.lmdb"))) == [(0, "0"), (1, "1"), (2, "2")]


def test_a_bad_item_says_where_and_what_when_it_is_read() -> None:
    item = bad_item("a.csv row 4", "the cell is empty.")
    for _ in range(2):
        with pytest.raises(SourceError, match=r"^a\.csv row 4: the cell is empty\.$"):
            item.read()


def test_a_gzip_file_is_known_by_its_bytes() -> None:
    for name, content in (("a.gz", b"plain"), ("b", gzip.compress(b"plain")), ("empty", b"")):
        Path(name).write_bytes(content)
        with open_unzipped(Path(name)) as file:
            assert file.read() == (b"" if name == "empty" else b"plain")
