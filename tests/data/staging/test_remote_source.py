"""What lies behind an address: fsspec's memory, and a real web server in its ways."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightning_speedkit.data.staging import resumable_copy
from lightning_speedkit.data.staging.remote_source import find_remote
from lightning_speedkit.errors import MissingExtraError, StagingError
from tests.data.http_server import Served, http_server

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
CONTENT = bytes(range(256)) * 4000
NAMES = json.dumps({"classes": ["cat", "dog"], "fingerprint": "00"}).encode()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it would have waited between two looks."""
    waited: list[float] = []
    monkeypatch.setattr(resumable_copy.time, "sleep", waited.append)
    return waited


def _in_memory(content: bytes, name: str = "a.lmdb") -> str:
    address = f"memory://{uuid.uuid4().hex}/{name}"
    with fsspec.open(address, "wb") as file:
        file.write(content)
    return address


@contextlib.contextmanager
def _site(files: dict[str, bytes | int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A web server with these paths, a number standing for an answer that is an error; and what it was asked for."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            asked.append((self.command, self.path))
            content = files.get(self.path, 404)
            if isinstance(content, int):
                self.send_error(content)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


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


def test_names_of_classes_in_a_folder_are_those_of_its_stores() -> None:
    place = _in_memory(b"one", "train.lmdb").removesuffix("/train.lmdb")
    before = find_remote(place, {}).identity
    system = fsspec.filesystem("memory")
    for name in ("gone.classes.json", "classes.json", "notes.json"):
        system.pipe(f"{place}/{name}", NAMES)
    assert find_remote(place, {}).identity == before
    system.pipe(f"{place}/val.lmdb", b"two")
    system.pipe(f"{place}/train.classes.json", NAMES)
    system.pipe(f"{place}/val.classes.json", b"")
    stores, names = find_remote(place, {}).files[:2], find_remote(place, {}).files[2:]
    assert [file.name for file in stores] == ["train.lmdb", "val.lmdb"]
    assert [(file.name, file.size, b"".join(file.stream())) for file in names] == [
        ("train.classes.json", len(NAMES), NAMES),
        ("val.classes.json", 0, b""),
    ]
    assert names[0].read is not None
    assert names[0].read(3, 5) == NAMES[3:8]


def test_the_version_of_names_is_their_content() -> None:
    address = _in_memory(CONTENT)
    names = address.replace("a.lmdb", "a.classes.json")
    seen = [find_remote(address, {}).identity]
    for content in (NAMES, NAMES.replace(b"dog", b"fox"), NAMES):
        fsspec.filesystem("memory").pipe(names, content)
        seen.append(find_remote(address, {}).identity)
    assert seen[1] == seen[3]
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (NAMES, True), (404, False), (403, False), (400, False), (405, False), (b"", False), (b"{", False),
        (b"<html>No such page</html>", False), (b'{"error": "no such page"}', False), (b"{" + bytes(10**6), False),
    ],
)  # fmt: skip
def test_on_the_web_names_cost_one_request_and_anything_else_is_none(answer: bytes | int, found: bool) -> None:
    paths: dict[str, bytes | int] = {"/sets/a.lmdb?key=1": CONTENT, "/sets/a.classes.json?key=1": answer}
    with _site(paths) as (address, asked):
        files = find_remote(f"{address}/sets/a.lmdb?key=1", {}).files
        assert [file.name for file in files] == ["a.lmdb", "a.classes.json"][: 1 + found]
        assert [path for path in asked if "classes" in path[1]] == [("GET", "/sets/a.classes.json?key=1")]
    if found:
        assert b"".join(files[1].stream()) == NAMES


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_names_of_which_nothing_is_known_are_not_taken_for_none(status: int) -> None:
    with (
        _site({"/a.lmdb": CONTENT, "/a.classes.json": status}) as (address, _),
        pytest.raises(ConnectionError, match=f"names of the classes of .*a.lmdb cannot .* answers {status}"),
    ):
        find_remote(f"{address}/a.lmdb", {})


def test_only_a_store_is_asked_for_names() -> None:
    with _site({"/words.txt": b"one two"}) as (address, asked):
        assert [file.name for file in find_remote(f"{address}/words.txt", {}).files] == ["words.txt"]
        assert {path for _, path in asked} == {"/words.txt"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError, None), (NotImplementedError, None), (KeyError, None), (OSError, ConnectionError)],
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_store_without_names_for_us_is_found_and_listed_names_are_certain(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], kind: type[Exception] | None, in_folder: bool
) -> None:
    address = _in_memory(CONTENT)
    system = fsspec.filesystem("memory")
    system.pipe(address.replace("a.lmdb", "a.classes.json"), NAMES)

    def fail(path: str, **settings: object) -> bytes:
        raise error("away")

    monkeypatch.setattr(system, "cat_file", fail)
    if in_folder:
        address = address.removesuffix("/a.lmdb")
        kind = StagingError if error is PermissionError else ConnectionError
    if kind is None:
        assert [file.name for file in find_remote(address, {}).files] == ["a.lmdb"]
    else:
        with pytest.raises(kind, match="may not be read" if kind is StagingError else "cannot be reached"):
            find_remote(address, {})


def test_a_chain_of_file_systems_is_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("in/a.lmdb", CONTENT)
        archive.writestr("b.lmdb", CONTENT)
        archive.writestr("b.classes.json", NAMES)
    (file,) = find_remote(f"zip://in/a.lmdb::file://{tmp_path}/b.zip", {}).files
    assert (file.name, b"".join(file.stream())) == ("a.lmdb", CONTENT)
    store, names = find_remote(f"zip://b.lmdb::file://{tmp_path}/b.zip", {}).files
    assert (store.name, names.name, b"".join(names.stream())) == ("b.lmdb", "b.classes.json", NAMES)


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
        (400, ConnectionError, "the server answers 400"),
        (429, ConnectionError, "the server answers 429"),
        (500, ConnectionError, "the server answers 500"),
        (503, ConnectionError, "the server answers 503"),
    ],
)
def test_what_a_web_server_answers_is_told(status: int, kind: type[Exception], told: str, pauses: list[float]) -> None:
    with http_server(Served(CONTENT, status=status)) as served:
        with pytest.raises(kind, match=told) as raised:
            find_remote(f"{served.address}/a.lmdb?key=secret", {})
        assert "secret" not in str(raised.value)
    assert pauses == ([0.5, 1.0, 2.0] if status in (429, 500, 503) else [])


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
