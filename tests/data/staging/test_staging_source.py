"""What lies behind a path: files, versions, and what is no file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.data.staging.staging_source import address_of, find_local, is_address, name_of, without_query
from lightning_speedkit.errors import StagingError


def _written(path: Path, content: bytes, mtime_ns: int = 10**18) -> str:
    path.write_bytes(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return str(path)


def test_a_file_is_read_from_any_place_and_as_a_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    source = find_local(_written(tmp_path / "a.bin", content))
    (file,) = source.files
    assert (source.name, source.bytes, source.is_folder, file.size) == ("a.bin", 10240, False, 10240)
    assert file.read is not None
    assert file.read(300, 7) == content[300:307]
    assert file.read(10230, 100) == content[10230:]
    assert b"".join(file.stream()) == content


def test_another_content_time_or_name_is_another_identity(tmp_path: Path) -> None:
    content = bytes(20_000)
    first = find_local(_written(tmp_path / "a.bin", content))
    assert find_local(_written(tmp_path / "a.bin", content)).identity == first.identity

    others = {
        "size": find_local(_written(tmp_path / "a.bin", content + b"x")),
        "time": find_local(_written(tmp_path / "a.bin", content, 10**18 + 1)),
        "end, by a clock that stands": find_local(_written(tmp_path / "a.bin", content[:-1] + b"x")),
        "place": find_local(_written(tmp_path / "b.bin", content)),
    }
    assert len({first.identity, *(other.identity for other in others.values())}) == 5
    assert {other.source_id == first.source_id for name, other in others.items() if name != "place"} == {True}
    assert others["place"].source_id != first.source_id


def test_of_a_folder_the_stores_count_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    (folder / "old.lmdb").mkdir(parents=True)  # an LMDB of another kind is a folder
    for name in ("val.lmdb", "train.lmdb", ".train.lmdb.tmp", ".hidden.lmdb", "notes.txt"):
        (folder / name).write_bytes(b"12345")
    source = find_local(str(folder))
    assert (source.name, source.is_folder, source.bytes) == ("sets", True, 10)
    assert [file.name for file in source.files] == ["train.lmdb", "val.lmdb"]


def test_names_of_classes_belong_to_a_store_that_is_there(tmp_path: Path) -> None:
    for name in ("train.lmdb", "val.lmdb", "plain"):
        _written(tmp_path / name, b"12345")
    single, folder = (find_local(str(path)) for path in (tmp_path / "train.lmdb", tmp_path))
    for name in ("gone.classes.json", ".train.classes.json.tmp", "classes.json", "train.lmdb.classes.json"):
        _written(tmp_path / name, b"of something else")
    (tmp_path / "train.classes.json").mkdir()
    (tmp_path / "val.classes.json").symlink_to("nowhere")
    assert find_local(str(tmp_path / "train.lmdb")).identity == single.identity
    assert find_local(str(tmp_path)).identity == folder.identity

    (tmp_path / "val.classes.json").unlink()
    for name in ("val.classes.json", "plain.classes.json"):
        _written(tmp_path / name, b"names")
    found = find_local(str(tmp_path))
    assert found.identity != folder.identity
    assert [(file.name, file.size) for file in found.files] == [
        ("train.lmdb", 5), ("val.lmdb", 5), ("val.classes.json", 5)
    ]  # fmt: skip
    assert [file.name for file in find_local(str(tmp_path / "plain")).files] == ["plain", "plain.classes.json"]
    assert b"".join(found.files[2].stream()) == b"names"
    changed = find_local(str(tmp_path / "val.lmdb")).identity
    _written(tmp_path / "val.classes.json", b"namen")
    assert find_local(str(tmp_path / "val.lmdb")).identity != changed


def test_a_store_of_the_longest_name_has_no_names_of_classes(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 250}.lmdb"
    assert [file.name for file in find_local(_written(path, b"x")).files] == [path.name]


def test_names_that_may_not_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, names = _written(tmp_path / "a.lmdb", b"x"), _written(tmp_path / "a.classes.json", b"x")
    opened = os.open

    def refuse(what: Any, *arguments: Any) -> int:
        if str(what) == names:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(what, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StagingError, match=r"a\.classes\.json may not be read by this user"):
        find_local(path)


def test_a_link_is_followed_and_keeps_its_name(tmp_path: Path) -> None:
    _written(tmp_path / "v1.lmdb", b"one")
    _written(tmp_path / "v2.lmdb", b"two")
    link = tmp_path / "train.lmdb"
    link.symlink_to("v1.lmdb")
    first = find_local(address_of(link))
    link.unlink()
    link.symlink_to("v2.lmdb")
    second = find_local(address_of(link))
    assert first.files[0].name == second.files[0].name == "train.lmdb"
    assert first.source_id == second.source_id
    assert first.identity != second.identity
    assert b"".join(second.files[0].stream()) == b"two"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loose").symlink_to("nowhere")
    for name, told in [
        ("pipe", "neither a file nor a folder"),
        ("empty", r"holds no \*\.lmdb file"),
        ("none", "There is nothing at"),
        ("file/below", "There is nothing at"),
        ("loose", "There is nothing at"),
    ]:
        with pytest.raises(StagingError, match=told):
            find_local(str(tmp_path / name))


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ESTALE, ConnectionError), (errno.EIO, ConnectionError), (errno.EACCES, StagingError)],
)
def test_a_file_server_that_is_away_is_not_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    path = _written(tmp_path / "a.bin", b"x")

    def away(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", away)
    with pytest.raises(kind, match=str(tmp_path)):
        find_local(path)


def test_addresses_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert address_of("a/../b.lmdb") == str(tmp_path / "b.lmdb")
    assert address_of(Path("b.lmdb")) == str(tmp_path / "b.lmdb")
    assert address_of("~/b.lmdb") == "/home/me/b.lmdb"
    assert address_of("file:///x/y") == address_of("local:///x/y") == "/x/y"
    assert address_of("gs://bucket/x/../y") == "gs://bucket/x/../y"
    assert address_of("gs://bucket/x/") == "gs://bucket/x"
    assert address_of("https://host/x/") == "https://host/x/"
    assert address_of("memory://") == "memory://"
    assert is_address("simplecache::s3://b/x")
    assert not is_address("time 10::30")


@pytest.mark.parametrize(
    ("source", "kind", "told"),
    [
        (Path("s3://bucket/a"), ValueError, "give an address as text"),
        ("", ValueError, "empty"),
        (3, TypeError, "got 3"),
        (b"a", TypeError, "got b'a'"),
    ],
)
def test_what_is_neither_is_refused(source: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        address_of(source)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("/data/train.lmdb", "train.lmdb"),
        ("s3://bucket/a#1/train?.lmdb", "train?.lmdb"),
        ("https://host/a/train.lmdb?signature=s/x#part", "train.lmdb"),
        ("zip://in/a.lmdb::https://host/b.zip", "a.lmdb"),
        ("simplecache::s3://bucket/sets/", "sets"),
    ],
)
def test_the_name_is_the_last_part(address: str, name: str) -> None:
    assert name_of(address) == name


def test_a_signature_is_cut_off() -> None:
    assert without_query("https://host/a?key=1#b") == "https://host/a"
    assert without_query("s3://bucket/a?b") == "s3://bucket/a?b"


def test_the_folder_of_a_copy_has_a_name_that_every_file_system_takes(tmp_path: Path) -> None:
    source = find_local(_written(tmp_path / f"{'ä' * 120}.lmdb", b"x"))
    assert len(source.key.encode()) <= 80 + 17
    assert source.key.endswith(f"-{source.identity}")
