"""Staging from end to end: over the web, killed in the middle, by several processes, and without its source."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.data.sources.class_names import read_classes, write_classes
from lightning_speedkit.data.staging import local_cache, resumable_copy
from lightning_speedkit.data.staging.local_cache import release_staged, stage_to_local
from lightning_speedkit.data.staging.staged_entries import remove_entry
from lightning_speedkit.data.staging.staged_record import read_record
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.data.store.lmdb_pack import write_lmdb
from lightning_speedkit.errors import MissingExtraError, StagingError
from lightning_speedkit.facts.storage import FileSystem
from tests.data.http_server import Served, http_server

CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_copy, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(resumable_copy, "_SAVE_BYTES", 1 << 18)
    monkeypatch.setattr(resumable_copy, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(local_cache, "_WAIT_SECONDS", 0.02)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return _store(tmp_path / "far" / "train.lmdb", 0)


def _store(path: Path, seed: int) -> Path:
    """About a megabyte, always of the same size."""
    samples = [(bytes([seed]) * 5000, seed * 1000 + i) for i in range(200)]
    return write_lmdb(samples, path, block_bytes=1 << 16)


def _forked(function: Callable[[], Any], answer: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer.write_text(json.dumps(function()))
            code = 0
        finally:
            os._exit(code)
    return child


def _wait_until(condition: Callable[[], Any]) -> Any:
    for _ in range(3000):
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise TimeoutError


def _released(path: Path) -> Path:
    release_staged(path)
    return path


def test_a_store_is_staged_once_and_used_again(store: Path, near: Path) -> None:
    copy = stage_to_local(store, folder=near)
    assert copy.parent.parent == near
    assert copy.read_bytes() == store.read_bytes()
    assert LMDBDataset(copy)[199] == (bytes(5000), 199)
    inode = copy.stat().st_ino
    assert stage_to_local(f"file://{store}", folder=near) == copy
    assert stage_to_local(copy, folder=near) == copy  # it lies there already
    assert copy.stat().st_ino == inode
    assert len(list(near.iterdir())) == 1


def test_a_source_of_the_same_size_and_time_but_another_content_is_staged_anew(store: Path, near: Path) -> None:
    first = _released(stage_to_local(store, folder=near))
    before = store.stat()
    _store(store, 1)
    os.utime(store, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert store.stat().st_size == before.st_size
    second = stage_to_local(store, folder=near)
    assert LMDBDataset(second)[0] == (b"\x01" * 5000, 1000)
    assert not first.exists()


def test_an_older_version_stays_while_it_is_in_use(store: Path, near: Path) -> None:
    first = stage_to_local(store, folder=near)
    _store(store, 1)
    second = stage_to_local(store, folder=near)
    assert first.exists()
    assert first != second
    release_staged(first)
    _store(store, 2)
    stage_to_local(store, folder=near)
    assert (first.exists(), second.exists()) == (False, True)


def test_a_folder_of_stores_is_staged_as_a_folder(tmp_path: Path, near: Path) -> None:
    far = tmp_path / "sets"
    for seed, name in enumerate(("train.lmdb", "val.lmdb")):
        _store(far / name, seed)
    (far / "notes.txt").write_text("not staged")
    copy = stage_to_local(far, folder=near)
    assert sorted(path.name for path in copy.glob("[!.]*")) == ["train.lmdb", "val.lmdb"]
    assert LMDBDataset(copy / "val.lmdb")[3] == (b"\x01" * 5000, 1003)
    release_staged(copy)
    assert remove_entry(copy)


@pytest.mark.parametrize("kind", ["store", "folder", "memory store", "memory folder"])
def test_names_of_classes_go_with_their_store_and_new_ones_are_staged_anew(
    store: Path, near: Path, tmp_path: Path, kind: str
) -> None:
    """The oracle is the content of the file as its format says, written here by hand."""
    source = str(store.parent if "folder" in kind else store)
    if "memory" in kind:
        fsspec = pytest.importorskip("fsspec")
        source = source.replace(str(tmp_path), f"memory://{tmp_path.name}-{kind[-4:]}")

    def publish(names: list[str] | None) -> None:
        beside = store.with_name("train.classes.json")
        beside.unlink(missing_ok=True)
        if names is not None:
            beside.write_text(json.dumps({"classes": names, "fingerprint": fingerprint}))
            os.utime(beside, (1e9, 1e9))
        if "memory" in kind:
            system = fsspec.filesystem("memory")
            place = source.removesuffix("/train.lmdb")
            if system.exists(f"{place}/train.classes.json"):
                system.rm(f"{place}/train.classes.json")
            for path in store.parent.iterdir():
                if not system.exists(f"{place}/{path.name}"):
                    system.pipe(f"{place}/{path.name}", path.read_bytes())

    write_classes(store, ["x"])
    fingerprint = json.loads(store.with_name("train.classes.json").read_text())["fingerprint"]
    copies = []
    for names in (None, ["cat", "dog"], ["cat", "fox"], None):
        publish(names)
        root = _released(stage_to_local(source, folder=near))
        copy = root / "train.lmdb" if "folder" in kind else root
        copies.append(copy.parent)
        assert stage_to_local(source, folder=near) == root
        release_staged(root)
        assert copy.read_bytes() == store.read_bytes()
        assert read_classes(copy) == (None if names is None else tuple(names))
        assert sorted(path.name for path in copy.parent.glob("[!.]*")) == (
            ["train.lmdb"] if names is None else ["train.classes.json", "train.lmdb"]
        )
        assert [path.name for path in near.iterdir()] == [copy.parent.name]
    assert copies[0] == copies[3]
    assert len(set(copies)) == 3


def test_names_that_were_removed_from_a_copy_come_back(store: Path, near: Path) -> None:
    write_classes(store, ["cat"])
    copy = stage_to_local(store, folder=near)
    copy.with_name("train.classes.json").unlink()
    with pytest.warns(UserWarning, match=r"made anew: train\.classes\.json cannot be read"):
        assert read_classes(stage_to_local(store, folder=near)) == ("cat",)
    release_staged(copy)
    assert remove_entry(copy.parent)
    assert list(near.iterdir()) == []


def test_a_read_only_source_is_only_read(tmp_path: Path, store: Path, near: Path) -> None:
    mounted = tmp_path / "read only"
    mounted.mkdir()
    commands = [["mount", "--bind", str(store.parent), str(mounted)], ["mount", "-o", "remount,ro,bind", str(mounted)]]
    if os.getuid() or any(subprocess.run(command, capture_output=True).returncode for command in commands):
        pytest.skip("mounting needs to be allowed")
    try:
        copy = stage_to_local(mounted / "train.lmdb", folder=near)
        assert [path.name for path in mounted.iterdir()] == ["train.lmdb"]
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
    assert copy.read_bytes() == store.read_bytes()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_store_is_staged_over_the_web(store: Path, near: Path, ranges: bool) -> None:
    pytest.importorskip("aiohttp")
    with http_server(Served(store.read_bytes(), ranges=ranges)) as served:
        address = f"{served.address}/sets/train.lmdb"
        copy = stage_to_local(address, folder=near)
        asked = len(served.requests)
        assert stage_to_local(address, folder=near) == copy
        assert len(served.requests) <= asked + 2  # the look at one byte, and the one for names of classes
        assert (copy.name, copy.read_bytes()) == ("train.lmdb", store.read_bytes())

        _store(store, 1)
        served.content, served.etag = store.read_bytes(), "v2"
        assert LMDBDataset(stage_to_local(address, folder=near))[5] == (b"\x01" * 5000, 1005)


def test_a_file_that_is_no_store_is_staged_too(near: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://speedkit/words.txt", "wb") as file:
        file.write(b"one two")
    assert stage_to_local("memory://speedkit/words.txt", folder=near).read_bytes() == b"one two"


@pytest.mark.parametrize("cut", [0, 100, 300_000])
def test_what_has_the_name_of_a_store_has_to_be_one(store: Path, near: Path, cut: int) -> None:
    pytest.importorskip("aiohttp")
    content = store.read_bytes()[:-cut] if cut else b"<!DOCTYPE html><title>Please log in</title>" * 9
    told = "without the seal.*begins with b'" if cut == 100 else "truncated" if cut else "begins with b'<!DOCTYPE html>"
    with http_server(Served(content)) as served:
        address = f"{served.address}/train.lmdb"
        with pytest.raises(StagingError, match=rf"The copy of {address} is damaged, and so is the source.*{told}"):
            stage_to_local(address, folder=near)
        assert list(near.iterdir()) == []
        served.content, served.etag = store.read_bytes(), "v2"
        assert LMDBDataset(stage_to_local(address, folder=near))[7] == (bytes(5000), 7)


def test_an_answer_that_passes_is_waited_for(store: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four looks, each of two requests as fsspec makes them, the last one is answered."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(resumable_copy, "_PAUSE_SECONDS", 0.5)
    pauses: list[float] = []
    monkeypatch.setattr(resumable_copy.time, "sleep", pauses.append)
    with http_server(Served(store.read_bytes(), refusals=[429, 429, 500, 500, 503, 503])) as served:
        copy = stage_to_local(f"{served.address}/train.lmdb", folder=near)
        assert served.refusals == []
    assert copy.read_bytes() == store.read_bytes()
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_copy_that_was_killed_goes_on_where_it_stopped(store: Path, near: Path, tmp_path: Path, ranges: bool) -> None:
    pytest.importorskip("aiohttp")
    content = store.read_bytes()
    with http_server(Served(content, ranges=ranges, stall_at=10 * CHUNK)) as served:
        address = f"{served.address}/train.lmdb"
        child = _forked(lambda: str(stage_to_local(address, folder=near)), tmp_path / "answer")

        def saved() -> int:
            parts = list(near.glob("*.part")) if near.exists() else []
            record = read_record(parts[0]) if parts else None
            return 0 if record is None else record.copied

        try:
            copied = _wait_until(saved)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert 0 < copied < len(content)
        assert copied == saved()
        served.stall_at = None
        served.go_on.set()
        served.requests.clear()
        copy = stage_to_local(address, folder=near)
        assert copy.read_bytes() == content
        starts = [request[0] for request in served.requests if request is not None and request[1] - request[0] > 1]
        if ranges:
            assert min(starts) == copied
            assert served.requests.count(None) == 2  # the looks for names of classes, before and after
        else:
            assert served.requests.count(None) == 3
    assert [path.name for path in near.iterdir()] == [copy.parent.name]


def test_of_several_processes_one_copies_and_all_get_the_copy(
    store: Path, near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = os.open(tmp_path / "trace", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    read = resumable_copy._read_exactly

    def slow(source: Any, start: int, size: int) -> bytes:
        os.write(trace, f"{start}\n".encode())
        time.sleep(0.02)
        return read(source, start, size)

    monkeypatch.setattr(resumable_copy, "_read_exactly", slow)
    answers = [tmp_path / f"answer {i}" for i in range(3)]
    children = [_forked(lambda: str(stage_to_local(store, folder=near)), answer) for answer in answers]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    paths = {json.loads(answer.read_text()) for answer in answers}
    os.close(trace)
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == store.read_bytes()
    starts = [int(line) for line in (tmp_path / "trace").read_text().split()]
    assert sorted(starts) == list(range(0, store.stat().st_size, CHUNK))
    assert len(list(near.iterdir())) == 1


def test_who_waits_shows_how_far_it_is_and_takes_over_from_the_dead(
    store: Path, near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = resumable_copy._read_exactly

    def stuck() -> str:
        def stop(source: Any, start: int, size: int) -> bytes:
            if start >= 10 * CHUNK:
                time.sleep(600)
            return read(source, start, size)

        resumable_copy._read_exactly = stop
        return str(stage_to_local(store, folder=near))

    child = _forked(stuck, tmp_path / "answer")
    _wait_until(lambda: near.exists() and any((part / "train.lmdb").exists() for part in near.glob("*.part")))
    pause = time.sleep
    waited = []

    def kill_after_a_while(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 10:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        pause(seconds)

    monkeypatch.setattr(local_cache.time, "sleep", kill_after_a_while)
    copy = stage_to_local(store, folder=near, progress=True)
    assert len(waited) >= 10
    assert copy.read_bytes() == store.read_bytes()
    told = capsys.readouterr().err
    assert "awaiting train.lmdb" in told
    assert "staging train.lmdb" in told


def test_a_copy_that_was_changed_is_made_anew(store: Path, near: Path) -> None:
    copy = stage_to_local(store, folder=near)
    content = bytearray(copy.read_bytes())
    content[300_000] ^= 1
    copy.write_bytes(content)
    with pytest.warns(UserWarning, match=r"is made anew: train\.lmdb was changed after it was staged"):
        assert stage_to_local(store, folder=near).read_bytes() == store.read_bytes()


def test_a_disk_that_forgets_is_found_if_asked_for(store: Path, near: Path) -> None:
    copy = stage_to_local(store, folder=near)
    before = copy.stat()
    with copy.open("r+b") as file:
        file.seek(300_000)
        file.write(b"\xff")
    os.utime(copy, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert stage_to_local(store, folder=near).read_bytes() != store.read_bytes()
    with pytest.warns(UserWarning, match=r"the checksum of train\.lmdb does not match"):
        assert stage_to_local(store, folder=near, recheck=True).read_bytes() == store.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage_to_local(store, folder=near, recheck=True)


def test_a_copy_without_its_record_is_made_anew(store: Path, near: Path) -> None:
    copy = stage_to_local(store, folder=near)
    (copy.parent / ".staged.json").unlink()
    copy.unlink()
    with pytest.warns(UserWarning, match="its record is missing"):
        assert stage_to_local(store, folder=near).read_bytes() == store.read_bytes()


def test_the_copy_used_longest_ago_makes_room(tmp_path: Path, near: Path) -> None:
    sources = [tmp_path / name for name in ("a", "b", "c", "d")]
    for number, path in enumerate(sources):
        path.write_bytes(bytes([number]) * 1000)
    a, b = (_released(stage_to_local(path, folder=near)) for path in sources[:2])
    for copy, used in ((a, 10), (b, 20)):
        os.utime(copy.parent / ".in-use", (used, used))
    _released(stage_to_local(sources[0], folder=near))  # used again, so b is now the one to go
    c = stage_to_local(sources[2], folder=near, max_bytes=2500)
    assert (a.exists(), b.exists(), c.exists()) == (True, False, True)
    stage_to_local(sources[0], folder=near)
    with pytest.raises(
        StagingError, match=r"1,000 bytes are needed, max_bytes=2500 allows 500 bytes, even if .*In use: "
    ):
        stage_to_local(sources[3], folder=near, max_bytes=2500)
    assert (a.exists(), c.exists()) == (True, True)


def test_a_source_that_cannot_be_reached_leaves_the_last_copy_with_a_warning(store: Path, near: Path) -> None:
    pytest.importorskip("aiohttp")
    with http_server(Served(store.read_bytes())) as served:
        address = f"{served.address}/train.lmdb"
        served.status = 500
        with pytest.raises(StagingError, match=r"the server answers 500. There is no earlier copy"):
            stage_to_local(address, folder=near)
        served.status = 0
        copy = stage_to_local(address, folder=near)
        served.status = 503
        with pytest.warns(UserWarning, match=r"the server answers 503. The copy .* may be older than the source"):
            assert stage_to_local(address, folder=near) == copy
        served.status = 404
        with pytest.raises(StagingError, match="There is nothing at"):
            stage_to_local(address, folder=near)
    with pytest.warns(UserWarning, match="cannot be reached"):
        assert stage_to_local(address, folder=near) == copy
    copy.write_bytes(b"changed")
    with pytest.raises(StagingError, match="There is no earlier copy"):
        stage_to_local(address, folder=near)


def test_a_source_that_never_rests_is_given_up(store: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1, 100))
    find = local_cache._find

    def changing(address: str, options: Any) -> Any:
        os.utime(store, ns=(next(times), 1000 + next(times)))
        return find(address, options)

    monkeypatch.setattr(local_cache, "_find", changing)
    with (
        pytest.warns(UserWarning, match="it changed while it was copied"),
        pytest.raises(StagingError, match="changed or was damaged 3 times"),
    ):
        stage_to_local(store, folder=near)
    assert list(near.iterdir()) == []


def test_a_path_on_a_local_disk_is_used_where_it_lies(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDKIT_CACHE", str(tmp_path / "cache"))
    link = tmp_path / "link.lmdb"
    link.symlink_to(store)
    for kind in ("disk", "memory"):
        monkeypatch.setattr(local_cache, "read_file_system", lambda path, kind=kind: FileSystem(kind=kind, type="x"))
        assert stage_to_local(store) == store
        assert stage_to_local(link) == link
    assert not (tmp_path / "cache").exists()

    def network(path: Any) -> FileSystem:
        return FileSystem(kind="network" if str(path).startswith(str(store.parent)) else "disk", type="x")

    monkeypatch.setattr(local_cache, "read_file_system", network)
    copy = stage_to_local(link)
    assert (copy.name, copy.parent.parent) == ("link.lmdb", tmp_path / "cache")
    assert copy.read_bytes() == store.read_bytes()


def test_a_folder_on_the_network_is_used_with_a_warning(
    store: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cache, "read_file_system", lambda path: FileSystem(kind="network", type="nfs4"))
    with pytest.warns(UserWarning, match="which is not local: nfs4, over the network"):
        assert stage_to_local(store, folder=near).parent.parent == near


def test_a_folder_that_cannot_be_locked_is_told(store: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(path: Path, *, wait: bool) -> Any:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(local_cache, "exclusive_lock", no_locks)
    with pytest.raises(StagingError, match=r"cannot be locked \(.*No locks available"):
        stage_to_local(store, folder=near)


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"max_bytes": True}, TypeError, "max_bytes must be an int or None, got True; give it in bytes"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes must be an int or None, got 1.5"),
        ({"max_bytes": "10GB"}, TypeError, r"got '10GB'; give it in bytes, such as 10 \* 10\*\*9"),
        ({"max_bytes": 0}, ValueError, "at least 1 byte, got 0"),
        ({"storage_options": {"key": "x"}}, ValueError, "storage_options are for addresses"),
    ],
)
def test_a_wrong_argument_is_told(
    store: Path, near: Path, settings: dict[str, Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        stage_to_local(store, folder=near, **settings)


def test_what_is_not_there_is_told(tmp_path: Path, near: Path) -> None:
    for folder in (None, near):
        with pytest.raises(StagingError, match=f"There is nothing at {tmp_path}/none.lmdb"):
            stage_to_local(tmp_path / "none.lmdb", folder=folder)


def test_without_fsspec_the_error_names_the_extra(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"lightning-speedkit\[storage\]"):
        stage_to_local("s3://bucket/a.lmdb", folder=near)


def test_many_calls_leak_no_descriptor(store: Path, near: Path) -> None:
    copy = stage_to_local(store, folder=near)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        assert stage_to_local(store, folder=near) == copy
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    release_staged(copy)
    release_staged(copy)
    release_staged("/somewhere/else")
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1
