"""The plain reader of LMDB's pages, compared with LMDB itself."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from lightning_speedkit.data.store.lmdb_pages import crc_of_spans, read_exactly, read_lmdb_meta, walk_tree
from lightning_speedkit.errors import StoreCorruptError


@contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("count", [0, 1, 10, 300, 30_000])
def test_the_walk_finds_what_lmdb_finds(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 28) as engine:
        for part in range(3):  # some commits, so that there are free pages too
            with engine.begin(write=True) as transaction:
                for i in range(part, count, 3):
                    transaction.put(b"key %d" % i, bytes([i % 256]) * (i * 37 % 5000 if i < 500 else 9))
        statistics = engine.stat()
        with engine.begin() as transaction:
            expected = list(transaction.cursor())
    with opened(path) as file:
        meta = read_lmdb_meta(file)
        assert meta is not None
        pages, records = walk_tree(file, meta)
        found = [(record.key, read_exactly(file, record.start, record.size)) for record in records]
    assert found == expected
    assert len(found) == count == meta.entries
    assert meta.page_bytes == statistics["psize"]
    assert meta.depth == statistics["depth"]
    assert len(pages) == len(set(pages)) == statistics["branch_pages"] + statistics["leaf_pages"]


def test_what_is_no_lmdb_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"", b"short", b"x" * 10_000):
        path.write_bytes(content)
        with opened(path) as file:
            assert read_lmdb_meta(file) is None


def test_a_tree_that_leads_to_no_tree_page(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), subdir=False) as engine, engine.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    with opened(path) as file:
        meta = read_lmdb_meta(file)
    assert meta is not None
    data = bytearray(path.read_bytes())
    data[meta.root * meta.page_bytes] ^= 255
    path.write_bytes(data)
    with opened(path) as file, pytest.raises(StoreCorruptError, match=f"Page {meta.root} "):
        walk_tree(file, meta)


def test_plain_reads(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 40_000)
    with opened(path) as file:
        assert read_exactly(file, 10, 5) == bytes([10, 11, 12, 13, 14])
        assert read_exactly(file, 10, 0) == b""
        with pytest.raises(StoreCorruptError, match="ends at byte 10240000, 1 bytes too early"):
            read_exactly(file, 10_239_990, 11)
        whole = path.read_bytes()
        assert crc_of_spans(file, [(3, 9_000_000), (9_500_000, 9_500_001)]) == zlib.crc32(
            whole[3:9_000_000] + whole[9_500_000:9_500_001]
        )
