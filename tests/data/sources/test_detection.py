"""Formats by name, by first bytes and by what a folder holds."""

from __future__ import annotations

import tarfile
from pathlib import Path

import lmdb
import numpy as np
import pytest

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.sources.detection import detect_format, files_of
from lightning_speedkit.errors import SourceError
from tests.data.sources.pictures import make_tree


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("a.npy", "npy"), ("a.NPZ", "npz"), ("a.csv", "csv"), ("a.tsv.gz", "csv"), ("a.parquet", "parquet"),
        ("a.pq", "parquet"), ("a.tar", "webdataset"), ("a.tgz", "webdataset"), ("a.tfrecord", "tfrecord"),
        ("a.tfrecords.gz", "tfrecord"), ("a.tfrecord-00001-of-00012", "tfrecord"),
    ],
)  # fmt: skip
def test_files_by_their_names(name: str, format_name: str) -> None:
    Path(name).touch()
    assert detect_format(name) == format_name
    Path("folder").mkdir()
    Path("folder", name).touch()
    if format_name not in ("npy", "npz"):
        assert detect_format("folder") == format_name


def test_files_by_their_content() -> None:
    write_lmdb([1], "store")
    lmdb.open("foreign", subdir=False).close()
    lmdb.open("folder").close()
    with Path("array").open("wb") as file:
        np.save(file, np.zeros(2))
    with tarfile.open("shard", "w") as archive:
        archive.add("array")
    Path("columns").write_bytes(b"PAR1....PAR1")
    names = ("store", "foreign", "folder", "folder/data.mdb", "array", "shard", "columns")
    assert [detect_format(name) for name in names] == ["store", "lmdb", "lmdb", "lmdb", "npy", "webdataset", "parquet"]


def test_a_folder_of_folders_is_a_tree_of_pictures() -> None:
    make_tree(Path("tree"), {"a": 1})
    assert detect_format("tree") == "image-folder"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("nowhere.csv", r"There is nothing at nowhere\.csv\. A source is a folder"),
        ("x" * 300, "There is nothing at"),
        ("s3://bucket/x.tar", "an address: bring it to this machine first"),
        ("empty", r"empty is of no format .*: it is empty \(0 bytes\)"),
        ("odd.bin", r"begins with b'hello'\. Name one with --format \(image-folder, npy"),
        ("mixed", r"The folder mixed holds 1 \.csv files, 1 \.tar files, 1 sub-folders, so its format is not clear"),
        ("flat", r"holds 2 pictures and no folder for each class. If flat is a class, give the folder above"),
        ("bare", "holds nothing, so"),
    ],
)
def test_what_is_not_known_is_told_with_what_was_seen(path: str, fault: str) -> None:
    Path("empty").touch()
    Path("odd.bin").write_text("hello")
    for folder, names in (("mixed", ("a.csv", "b.tar", "sub/x")), ("flat", ("a.jpg", "b.PNG")), ("bare", ())):
        Path(folder).mkdir()
        for name in names:
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).touch()
    with pytest.raises(SourceError, match=fault):
        detect_format(path)


def test_a_wrong_path_is_told_with_the_nearest() -> None:
    make_tree(Path("photographs"), {"things": 1})
    with pytest.raises(SourceError, match=r"There is nothing at photographs/thing\. Did you mean photographs/things\?"):
        detect_format("photographs/thing")
    with pytest.raises(SourceError, match=r"There is nothing at photos/things\. There is no folder photos either\."):
        detect_format("photos/things")
    with pytest.raises(SourceError, match=r"photographs/things holds 1 pictures and .* give the folder above it"):
        detect_format("photographs/things")


def test_the_files_of_folders_and_patterns() -> None:
    for i in range(9, 12):
        Path(f"a-{i}.tar").touch()
        Path(f"a-{i:03d}.tar").touch()
    Path("other.txt").touch()
    assert [path.name for path in files_of("a-{9..11}.tar", "webdataset")] == ["a-9.tar", "a-10.tar", "a-11.tar"]
    assert [path.name for path in files_of("a-{009..011}.tar", "webdataset")] == ["a-009.tar", "a-010.tar", "a-011.tar"]
    assert [path.name for path in files_of("a-{10,009}.tar", "webdataset")] == ["a-10.tar", "a-009.tar"]
    names = ["a-010.tar", "a-011.tar", "a-10.tar", "a-11.tar"]
    assert [path.name for path in files_of("a-{0,}1{0,1}.tar", "webdataset")] == names
    assert len(files_of(".", "webdataset")) == 6
    Path("odd{1}.tar").touch()
    assert [str(path) for path in files_of("odd{1}.tar", "webdataset")] == ["odd{1}.tar"]
    assert detect_format("a-{9..11}.tar") == "webdataset"
    with pytest.raises(SourceError, match=r"There is no file a-12\.tar and 1 more"):
        files_of("a-{11..13}.tar", "webdataset")
    with pytest.raises(SourceError, match=r"\. holds no file of the format csv, but .*\.tar files"):
        files_of(".", "csv")
