"""LMDB databases as tutorials write them: pickles only on demand, keys, raw values, and damage."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from lightning_speedkit.data.sources.foreign_lmdb import ForeignLmdb
from lightning_speedkit.errors import SourceError


def database(items: dict[bytes, bytes], name: str = "db", **options: Any) -> Path:
    with lmdb.open(name, map_size=1 << 24, **options) as environment, environment.begin(write=True) as transaction:
        for key, value in items.items():
            transaction.put(key, value)
    return Path(name)


class Touch:
    """A pickle of it makes a file when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("code-ran",)


def test_pickles_are_not_loaded_unless_trusted() -> None:
    path = database({b"0": pickle.dumps(Touch())})
    with pytest.raises(SourceError, match=r"holds Python pickles.*--trust-pickle"):
        ForeignLmdb(path)
    assert not Path("code-ran").exists()
    list(ForeignLmdb(path, trust_pickle=True))
    assert Path("code-ran").exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("subdir", [True, False])
def test_pickled_samples_come_in_the_order_of_their_numbers(protocol: int, subdir: bool) -> None:
    samples = [(np.full((2, 3), i, np.uint8), i) for i in range(12)]
    items = {str(i).encode(): pickle.dumps(sample, protocol) for i, sample in enumerate(samples)}
    items |= {b"__len__": pickle.dumps(12), b"__keys__": pickle.dumps([*items]), b"length": b"12"}
    source = ForeignLmdb(database(items, subdir=subdir), trust_pickle=True)
    assert len(source) == 12
    assert [(array.tolist(), label) for array, label in source] == [(a.tolist(), i) for a, i in samples]
    assert source.notes() == ("keys that describe the database were left out: __keys__, __len__, length",)
    place = "db/data.mdb" if subdir else "db"
    assert [item.place for item in source.items()][10] == f"{place} key b'10'"


def test_other_values_stay_bytes_beside_their_key() -> None:
    source = ForeignLmdb(
        database({b"cat_2": b"\xff\xd8jpeg", b"cat_10": b"", "é\n".encode(): b"x" * 9000, b"\xff": b"1"})
    )
    assert list(source) == [
        {"key": "cat_10", "value": b""},
        {"key": "cat_2", "value": b"\xff\xd8jpeg"},
        {"key": "é\n", "value": b"x" * 9000},
        {"key": "\\xff", "value": b"1"},
    ]
    with pytest.raises(SourceError, match="does not hold pickles"):
        ForeignLmdb(Path("db"), trust_pickle=True)


def test_a_pickle_that_cannot_be_loaded_names_its_key() -> None:
    good, missing = pickle.dumps(1), b"\x80\x04\x8c\x07no_such\x8c\x01x\x93."
    first, second, third = ForeignLmdb(
        database({b"a": good, b"b": missing, b"c": good[:-1]}), trust_pickle=True
    ).items()
    assert first.read() == 1
    with pytest.raises(
        SourceError, match=r"key b'b': cannot be unpickled \(ModuleNotFoundError: No module named 'no_such'"
    ):
        second.read()
    with pytest.raises(SourceError, match="key b'c': cannot be unpickled"):
        third.read()


def test_values_are_those_that_lmdb_reads_back_whatever_their_size() -> None:
    random = np.random.default_rng(0)
    items = {b"%04d" % i: random.bytes(int(random.integers(0, 12000))) for i in range(300)}
    path = database(items)
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.delete(b"0007")  # free pages inside the file
        transaction.put(b"0008", b"new")
    expected = {key: value for key, value in items.items() if key != b"0007"} | {b"0008": b"new"}
    assert {s["key"].encode(): s["value"] for s in ForeignLmdb(path)} == expected


def test_a_file_that_is_cut_or_damaged_is_an_error_and_no_crash() -> None:
    file = database({b"%04d" % i: b"v" * 3000 for i in range(100)}) / "data.mdb"
    whole = file.read_bytes()
    used = len(whole.rstrip(b"\0"))
    for size in (0, 100, 4096, 8192, used // 2, used - 4096):
        file.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"data\.mdb"):
            ForeignLmdb(file)
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole[:used])
        for _ in range(40):
            damaged[random.integers(used)] = random.integers(256)
        damaged += bytes(len(whole) - used)
        file.write_bytes(damaged)
        with contextlib.suppress(SourceError):
            list(ForeignLmdb(file))


def test_databases_inside_and_files_of_other_kinds_are_refused() -> None:
    with lmdb.open("named", map_size=1 << 24, max_dbs=2) as environment:
        for name in (b"train", b"val"):
            with environment.begin(write=True, db=environment.open_db(name)) as transaction:
                transaction.put(b"0", b"x")
    with pytest.raises(SourceError, match=r"holds databases of their own \(b'train', b'val'\)"):
        ForeignLmdb(Path("named"))
    assert len(ForeignLmdb(database({b"0": b"\xab" * 48}))) == 1
    Path("text.lmdb").write_text("hello")
    with pytest.raises(SourceError, match=r"text\.lmdb is not an LMDB 0\.9 file"):
        ForeignLmdb(Path("text.lmdb"))
    with pytest.raises(SourceError, match="cannot be opened"):
        ForeignLmdb(Path("nowhere"))
    assert list(ForeignLmdb(database({}, "empty"))) == []
