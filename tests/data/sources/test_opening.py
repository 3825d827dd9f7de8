"""open_source and find_splits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.sources.opening import classes_of, find_splits, open_source
from lightning_speedkit.errors import MissingExtraError, SourceError
from tests.data.sources.pictures import make_tree
from tests.data.sources.records import example, int_feature, record


@pytest.fixture
def everything() -> dict[str, str]:
    """One source of each format with two samples, as files of the current folder."""
    import pyarrow as pa
    from pyarrow import parquet

    from tests.data.sources.test_webdataset_shards import shard

    make_tree(Path("tree"), {"a": 1, "b": 1})
    np.save("a.npy", np.arange(2))
    np.savez("a.npz", x=np.arange(2))
    Path("a.csv").write_text("x\n0\n1\n")
    parquet.write_table(pa.table({"x": [0, 1]}), "a.parquet")
    shard("a.tar", [("0.cls", b"0"), ("1.cls", b"1")])
    Path("a.tfrecord").write_bytes(b"".join(record(example({"x": int_feature(i)})) for i in range(2)))
    with lmdb.open("db") as environment, environment.begin(write=True) as transaction:
        for i in range(2):
            transaction.put(b"%d" % i, b"%d" % i)
    write_lmdb(range(2), "a.lmdb")
    Path("made_source.py").write_text("samples = [0, 1]")
    return {
        "image-folder": "tree", "npy": "a.npy", "npz": "a.npz", "csv": "a.csv", "parquet": "a.parquet",
        "webdataset": "a.tar", "tfrecord": "a.tfrecord", "lmdb": "db", "store": "a.lmdb",
        "python": "made_source:samples",
    }  # fmt: skip


def test_every_format_is_found_and_read(everything: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for name, path in everything.items():
        for given in (None, name):
            source = open_source(path, format=given)
            assert (source.format, len(source), len(list(source))) == (name, 2, 2)


HEEDED: dict[str, tuple[Any, set[str]]] = {
    "columns": ("x", {"npz", "csv", "parquet", "webdataset", "tfrecord"}),
    "check": ("full", {"image-folder", "webdataset"}),
    "trust_pickle": (True, {"lmdb"}),
    "classes": (("a", "b"), {"image-folder"}),
}


@pytest.mark.parametrize("option", HEEDED)
def test_an_option_without_effect_is_refused(
    option: str, everything: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    value, heeding = HEEDED[option]
    for name, path in everything.items():
        if name not in heeding:
            with pytest.raises(ValueError, match=f"{option} has no effect on the format {name}, only on"):
                open_source(path, **{option: value})


@pytest.mark.parametrize(
    ("name", "library", "options"),
    [
        ("csv", "pyarrow", {}),
        ("parquet", "pyarrow", {}),
        ("tfrecord", "crc32c", {}),
        ("image-folder", "PIL", {"check": "full"}),
    ],
)
def test_a_missing_library_is_named_with_the_extra(
    name: str, library: str, options: dict[str, Any], everything: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    shown = {"PIL": "pillow"}.get(library, library)
    with pytest.raises(MissingExtraError, match=rf"needs {shown}, which is not installed: .*speedkit\[pack\]"):
        list(open_source(everything[name], **options))


def test_wrong_arguments_name_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="format must be one of image-folder, npy"):
        open_source("x", format="tar")
    with pytest.raises(ValueError, match="check must be one of quick, full, none"):
        open_source("x", check="some")
    for name in ("npy", "csv", "lmdb", "image-folder", "webdataset"):
        with pytest.raises(SourceError, match="nothing at nowhere"):
            open_source("nowhere", format=name)


def test_folders_named_as_splits_are_splits() -> None:
    make_tree(Path("data/Training"), {"cat": 1, "dog": 1})
    make_tree(Path("data/valid"), {"dog": 1, "emu": 1})
    splits = find_splits("data")
    assert splits == {"train": Path("data/Training"), "val": Path("data/valid")}
    assert classes_of(splits) == ("cat", "dog", "emu")
    assert list(open_source(splits["val"], classes=classes_of(splits)).classes) == ["cat", "dog", "emu"]
    assert [label for _, label in open_source(splits["val"], classes=classes_of(splits))] == [1, 2]
    with pytest.raises(SourceError, match="holds the splits train, val: give one of its folders"):
        open_source("data")
    make_tree(Path("data/validation"), {"dog": 1})
    with pytest.raises(SourceError, match="two folders for the split val: valid and validation"):
        find_splits("data")


def test_classes_that_are_named_as_splits_are_classes() -> None:
    make_tree(Path("vehicles"), {"train": 2, "test": 1})
    assert find_splits("vehicles") == {}
    assert open_source("vehicles").classes == ("test", "train")
    make_tree(Path("mixed"), {"train": 1, "bus": 1})
    assert find_splits("mixed") == find_splits("nowhere") == find_splits(__file__) == {}
