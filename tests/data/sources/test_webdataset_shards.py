"""WebDataset shards that Python's tarfile wrote: grouping, decoding, choice, and damage."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_speedkit.data.sources.webdataset_shards import WebDatasetShards
from lightning_speedkit.errors import SourceError
from tests.data.sources.pictures import encoded, picture


def shard(name: str, files: list[tuple[str, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(name, mode) as archive:
        for file, content in files:
            info = tarfile.TarInfo(file)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return Path(name)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


IMAGES = [encoded(picture(i)) for i in range(6)]
FILES = [
    (f"part/{i:03d}.{extension}", content)
    for i, image in enumerate(IMAGES)
    for extension, content in (("jpg", image), ("cls", b"%d\n" % (i % 3)))
]


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar", "w|")])
def test_files_of_a_key_are_one_sample(name: str, mode: str) -> None:
    source = WebDatasetShards([shard(name, FILES, mode)])
    assert list(source) == [{"jpg": image, "cls": i % 3} for i, image in enumerate(IMAGES)]
    assert len(source) == 6
    assert [item.place for item in source.items()][1] == f"{name} key 'part/001'"


def test_every_extension_becomes_its_type() -> None:
    meta = {"a": [1, 2], "é": None}
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    archive = io.BytesIO()
    np.savez(archive, x=array, y=np.int8([1]))
    files = [
        ("k.JPG", IMAGES[0]), ("k.txt", "é犬".encode()), ("k.json", json.dumps(meta).encode()), ("k.npy", npy(array)),
        ("k.npz", archive.getvalue()), ("k.left.npy", npy(array + 1)), ("k.index", b"12"), ("k.wav", b"RIFF"),
        ("k.seg.png", encoded(picture(0), "PNG")),
    ]  # fmt: skip
    (sample,) = WebDatasetShards([shard("a.tar", files)])
    assert list(sample) == ["jpg", "txt", "json", "npy", "npz", "left.npy", "index", "wav", "seg.png"]
    assert (sample["jpg"], sample["txt"], sample["index"], sample["wav"]) == (IMAGES[0], "é犬", 12, b"RIFF")
    assert json.loads(sample["json"]) == meta
    assert np.array_equal(sample["npy"], array)
    assert np.array_equal(sample["left.npy"], array + 1)
    assert (list(sample["npz"]), sample["npz"]["y"].dtype) == (["x", "y"], np.int8)


def test_the_choice_orders_renames_and_takes_the_key() -> None:
    files = [
        ("0.png", encoded(picture(0), "PNG")),
        ("0.cls", b"1"),
        ("0.txt", b"t"),
        ("1.jpg", IMAGES[1]),
        ("1.cls", b"2"),
    ]
    path = shard("a.tar", files)
    source = WebDatasetShards([path], columns={"jpg;png": "", "__key__": "", "cls": ""})
    samples = list(source)
    assert [list(sample) for sample in samples] == [["jpg", "__key__", "cls"]] * 2
    assert [(sample["__key__"], sample["cls"]) for sample in samples] == [("0", 1), ("1", 2)]
    items = list(WebDatasetShards([path], columns={"txt": ""}).items())
    assert items[0].read() == {"txt": "t"}
    with pytest.raises(SourceError, match=r"^a\.tar key '1': it has no txt, but jpg, cls\.$"):
        items[1].read()
    with pytest.raises(ValueError, match="cls:int"):
        WebDatasetShards([path], columns={"cls": "int"})


def test_long_names_folders_and_files_without_a_sample() -> None:
    key = "d" * 90 + "/" + "f" * 150
    with tarfile.open("a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("README", ".hidden.txt", f"{key}.txt", f"{key}.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"5"))
    source = WebDatasetShards([Path("a.tar")])
    assert list(source) == [{"txt": "5", "cls": 5}]
    assert len(source) == 1
    assert source.notes() == (
        "files of the shards that belong to no sample were left out: 1 without an extension, 1 hidden",
    )


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("cls", b"cat", r"its \.cls is not what the extension says \(invalid literal"),
        ("txt", b"\xff", r"its \.txt is not"),
        ("json", b"{", r"its \.json is not"),
        ("npy", b"\x93NUMPYxx", r"its \.npy is not"),
        ("npz", b"PK", r"its \.npz is not"),
        ("jpg", IMAGES[0][:-9], r"\.jpg: A truncated JPEG of 10 x 12 pixels: its \d+ bytes lack the end"),
    ],
)
def test_a_broken_file_names_shard_and_key(name: str, content: bytes, fault: str) -> None:
    items = list(WebDatasetShards([shard("a.tar", [("good.x", b""), (f"k.{name}", content)])]).items())
    items[0].read()
    with pytest.raises(SourceError, match=rf"^a\.tar key 'k'.*{fault}"):
        items[1].read()


def test_pickled_arrays_and_double_extensions_are_faults() -> None:
    objects = io.BytesIO()
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    first, second = WebDatasetShards(
        [shard("a.tar", [("a.npy", objects.getvalue()), ("b.txt", b"1"), ("b.TXT", b"2")])]
    ).items()
    with pytest.raises(SourceError, match=r"key 'a': its \.npy"):
        first.read()
    with pytest.raises(SourceError, match="key 'b': two of its files have one extension"):
        second.read()


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_shard_that_is_cut_anywhere_is_found_before_and_while_it_is_read(name: str) -> None:
    path = shard(name, FILES, "w:gz" if name.endswith("gz") else "w")
    whole = path.read_bytes()
    last = len(whole) if name.endswith("gz") else len(whole.rstrip(b"\0"))
    for size in {700, 1024, last // 2, (last // 2) // 512 * 512, last - 3, last // 512 * 512}:
        path.write_bytes(whole[:size])
        source = WebDatasetShards([path])
        with pytest.raises(SourceError, match=rf"^{name}: "):
            len(source)
        *good, bad = source.items()
        for i, item in enumerate(good):
            assert item.read() == {"jpg": IMAGES[i], "cls": i % 3}
        with pytest.raises(SourceError, match=name):
            bad.read()


def test_a_damaged_header_is_not_the_end() -> None:
    path = shard("a.tar", FILES)
    content = bytearray(path.read_bytes())
    content[content.index(b"part/003.jpg") + 150] ^= 0xFF  # the checksum of that header
    path.write_bytes(content)
    *good, bad = WebDatasetShards([path]).items()
    assert [item.read()["cls"] for item in good] == [0, 1]
    with pytest.raises(SourceError, match=r"after the key 'part/001': the shard has no end mark"):
        bad.read()
    with pytest.raises(SourceError, match="cannot be read as a tar file"):
        len(WebDatasetShards([Path(path).with_name("nowhere.tar")]))


def test_shards_follow_one_another() -> None:
    paths = [shard(f"{i}.tar", [("same.cls", str(i).encode())]) for i in range(3)]
    assert [sample["cls"] for sample in WebDatasetShards(paths)] == [0, 1, 2]
