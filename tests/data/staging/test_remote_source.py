"""What lies behind an address: fsspec's memory, and a real web server in its ways."""

from __future__ import annotations

import socket
import sys
import uuid
import zipfile
from pathlib import Path

import pytest

from lightning_speedkit.data.staging.remote_source import find_remote
from lightning_speedkit.errors import MissingExtraError, StagingError
from tests.data.http_server import Served, http_server

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
CONTENT = bytes(range(256)) * 4000


def _in_memory(content: bytes, name: str = "a.lmdb") -> str:
    address = f"memory://{uuid.uuid4().hex}/{name}"
    with fsspec.open(address, "wb") as file:
        file.write(content)
    return address


def test_memory_is_read_in_parts_and_its_versions_are_told_apart() -> None:
    address = _in_memory(CONTENT)
    source = find_remote(address, {})
    (file,) = source.files
    assert (file.name, file.size, source.is_folder, source.shown) == ("a.lmdb", len(CONTENT), False, address)
    assert file.read is not None
    assert file.read(700, 50) == CONTENT[700:750]
    assert b"".join(file.stream()) == CONTENT
    assert find_remote(address, {}).identity == source.identity
    with fsspec.open(address, "wb") as again:
        again.write(CONTENT)
    assert find_remote(address, {}).identity != source.identity


def test_a_folder_stands_for_its_stores() -> None:
    place = _in_memory(b"one", "sets/train.lmdb").removesuffix("/train.lmdb")
    for name in ("val.lmdb", "readme.txt"):
        with fsspec.open(f"{place}/{name}", "wb") as file:
            file.write(name.encode())
    source = find_remote(place, {})
    assert (source.name, source.is_folder) == ("sets", True)
    assert [(file.name, b"".join(file.stream())) for file in source.files] == [
        ("train.lmdb", b"one"),
        ("val.lmdb", b"val.lmdb"),
    ]


def test_a_chain_of_file_systems_is_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("in/a.lmdb", CONTENT)
    (file,) = find_remote(f"zip://in/a.lmdb::file://{tmp_path}/b.zip", {}).files
    assert (file.name, b"".join(file.stream())) == ("a.lmdb", CONTENT)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_is_read_in_parts_only_if_it_sends_parts(ranges: bool) -> None:
    with http_server(Served(CONTENT, ranges=ranges)) as served:
        (file,) = find_remote(f"{served.address}/train.lmdb?key=secret", {}).files
        assert (file.name, file.size, dict(file.version)) == ("train.lmdb", len(CONTENT), {"ETag": '"v1"'})
        assert (file.read is not None) == ranges
        if file.read is not None:
            assert file.read(1000, 24) == CONTENT[1000:1024]
            assert served.requests[-1] == (1000, 1024)
        assert b"".join(file.stream()) == CONTENT
        served.etag = "v2"
        assert dict(find_remote(f"{served.address}/train.lmdb", {}).files[0].version) == {"ETag": '"v2"'}


def test_a_web_server_that_tells_no_size_is_read_as_it_comes() -> None:
    with http_server(Served(CONTENT, tells_size=False)) as served:
        source = find_remote(f"{served.address}/a.lmdb", {})
        assert (source.bytes, source.files[0].read) == (None, None)
        assert b"".join(source.files[0].stream()) == CONTENT


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (404, StagingError, "There is nothing at"),
        (410, StagingError, "There is nothing at"),
        (403, StagingError, "may not be read .*credentials"),
        (500, ConnectionError, "the server answers 500"),
        (503, ConnectionError, "the server answers 503"),
    ],
)
def test_what_a_web_server_answers_is_told(status: int, kind: type[Exception], told: str) -> None:
    with http_server(Served(CONTENT, status=status)) as served:
        with pytest.raises(kind, match=told) as raised:
            find_remote(f"{served.address}/a.lmdb?key=secret", {})
        assert "secret" not in str(raised.value)


def test_a_server_that_is_not_there_cannot_be_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ConnectionError, match="cannot be reached"):
            find_remote(f"http://127.0.0.1:{taken.getsockname()[1]}/a.lmdb", {})


def test_a_missing_object_is_not_there() -> None:
    with pytest.raises(StagingError, match=r"There is nothing at memory://none/a.lmdb"):
        find_remote("memory://none/a.lmdb", {})


def test_an_address_without_a_name_is_refused() -> None:
    with http_server(Served(CONTENT)) as served, pytest.raises(StagingError, match="does not end in the name of"):
        find_remote(f"{served.address}/", {})


def test_an_unknown_protocol_is_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match=r"htpt.*did you mean .*http"):
        find_remote("htpt://host/a", {})


def test_a_protocol_whose_library_is_missing_says_what_to_install() -> None:
    from fsspec.registry import known_implementations

    protocol = "speedkit-test-far"
    known_implementations[protocol] = {"class": "no_such_library.Far", "err": "Install farfs"}
    try:
        with pytest.raises(StagingError, match="Install farfs"):
            find_remote(f"{protocol}://a/b", {})
    finally:
        del known_implementations[protocol]


@pytest.mark.parametrize("library", ["fsspec", "aiohttp"])
def test_without_the_extra_the_error_names_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"needs {library}, .*lightning-speedkit\[storage\]"):
        find_remote("https://host/a.lmdb", {})


def test_a_password_is_not_told() -> None:
    with http_server(Served(CONTENT)) as served:
        host = served.address.removeprefix("http://")
        source = find_remote(f"http://me:secret@{host}/a.lmdb?key=secret", {})
        assert source.shown == f"http://{host}/a.lmdb"
        assert "secret" in source.address
