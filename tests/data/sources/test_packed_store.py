"""A store as a source of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.sources.class_names import write_classes
from lightning_speedkit.data.sources.packed_store import PackedStore
from lightning_speedkit.errors import SourceError


def test_samples_and_classes_are_those_of_the_store() -> None:
    samples = [(b"x" * i, i % 2) for i in range(9)]
    store = write_lmdb(samples, "a.lmdb")
    assert (list(PackedStore(store)), PackedStore(store).classes) == (samples, ())
    write_classes(store, ("even", "odd"))
    assert PackedStore(store).classes == ("even", "odd")
    assert [item.place for item in PackedStore(Path("a.lmdb")).items()][2] == "a.lmdb sample 2"


def test_a_damaged_store_is_an_error_of_the_source() -> None:
    store = write_lmdb([(b"x" * 5000, i) for i in range(9)], "a.lmdb")
    whole = bytearray(store.read_bytes())
    store.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match=r"a\.lmdb"):
        PackedStore(store)
    whole[whole.index(b"x" * 5000) + 100] ^= 1
    store.write_bytes(whole)
    with pytest.raises(SourceError, match=r"sample 0: .*a\.lmdb"):
        list(PackedStore(store))
    with pytest.raises(SourceError, match="no store at"):
        PackedStore(Path("nowhere.lmdb"))
