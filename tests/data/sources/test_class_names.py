"""The names of classes beside a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.sources.class_names import classes_path, holds_class_names, read_classes, write_classes
from lightning_speedkit.errors import SourceError, StoreNotFoundError


@pytest.fixture
def store() -> Path:
    return write_lmdb([(b"x", 0)], "train.lmdb")


def test_names_come_back_whatever_letters_they_have(store: Path) -> None:
    names = ("Katze", "犬", 'with "quotes" and \n', "\udcff")
    assert read_classes(store) is None
    write_classes(store, names)
    assert read_classes("train.lmdb") == names
    assert holds_class_names(Path("train.classes.json").read_bytes())
    assert sorted(p.name for p in Path().iterdir()) == ["train.classes.json", "train.lmdb"]
    assert classes_path("a/b.store") == Path("a/b.store.classes.json")


def test_no_names_remove_those_of_an_older_store(store: Path) -> None:
    write_classes(store, ("a",))
    write_classes(store, ())
    assert read_classes(store) is None
    assert not classes_path(store).exists()


def test_names_of_a_store_that_was_replaced_are_not_taken(store: Path) -> None:
    write_classes(store, ("a",))
    write_lmdb([(b"other", 1)], store)
    with pytest.raises(SourceError, match="belongs to another store"):
        read_classes(store)


def test_damage_and_a_missing_store_are_errors(store: Path) -> None:
    for content in (b"", b"[1]", b"{}", b'{"classes": 3, "fingerprint": ""}'):
        classes_path(store).write_bytes(content)
        assert not holds_class_names(content)
        with pytest.raises(SourceError, match=r"train\.classes\.json does not hold"):
            read_classes(store)
    with pytest.raises(StoreNotFoundError):
        read_classes("nothing.lmdb")


def test_a_store_below_the_home_folder(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(store, ("a",))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_classes("~/train.lmdb") == ("a",)
