"""A store is complete or not there: killed writers, full disks, errors in the samples, and two writers at once."""

from __future__ import annotations

import multiprocessing
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from lightning_speedkit.data import LMDBDataset, LMDBWriter, verify_lmdb, write_lmdb
from lightning_speedkit.data.store import block_appender, lmdb_writer
from lightning_speedkit.data.store.block_appender import BlockAppender
from lightning_speedkit.errors import StoreWriteError
from tests.data.forked import end_of_fork, kill_self

OLD = [b"old" * 1000] * 20


NEW = [bytes([i]) * 3000 for i in range(100)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lmdb"


def write(samples: Any, path: Path) -> Path:
    return write_lmdb(samples, path, block_bytes=4096)


def content(path: Path) -> list[bytes]:
    verify_lmdb(path)
    dataset = LMDBDataset(path)
    return dataset.__getitems__(range(len(dataset)))


def killed_at(sample: int) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        def samples() -> Iterator[bytes]:
            yield from NEW[:sample]
            kill_self()

        write(samples(), path)

    return run


def killed_around(name: str, *, after: bool, of: Any = lmdb_writer) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        real = getattr(of, name)

        def replacement(*arguments: Any) -> Any:
            if not after:
                kill_self()
            real(*arguments)
            kill_self()

        setattr(of, name, replacement)
        block_appender._COMMIT_BYTES = 20_000
        write(NEW, path)

    return run


MOMENTS = {
    "before the first sample": (killed_at(0), False),
    "after one sample": (killed_at(1), False),
    "in the middle": (killed_at(50), False),
    "after the last sample": (killed_at(100), False),
    "before the first commit": (killed_around("_commit", after=False, of=BlockAppender), False),
    "after the first commit": (killed_around("_commit", after=True, of=BlockAppender), False),
    "before the seal": (killed_around("_seal", after=False), False),
    "in the seal, before it is synced": (killed_around("fsync", after=False, of=os), False),
    "after the seal": (killed_around("_seal", after=True), False),
    "before the rename": (killed_around("replace", after=False, of=Path), False),
    "after the rename": (killed_around("replace", after=True, of=Path), True),
    "before the folder is synced": (killed_around("sync_folder", after=False), True),
}


@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("old", [True, False])
def test_a_killed_writer_leaves_the_old_store_or_the_new_one(path: Path, moment: str, old: bool) -> None:
    run, published = MOMENTS[moment]
    if old:
        write(OLD, path)
    assert end_of_fork(lambda: run(path)) == "SIGKILL"
    if published:
        assert content(path) == NEW
    elif old:
        assert content(path) == OLD
    else:
        assert not path.exists()
    assert path.parent.joinpath(".a.lmdb.lock").exists()
    write(NEW, path)  # the next writer is not held up, and cleans what the dead one left
    assert content(path) == NEW
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]


@pytest.mark.parametrize("limit", [1, 4096, 100_000, "lmdb", "all but one byte"])
def test_a_full_disk_is_an_error_that_leaves_the_old_store(path: Path, limit: int | str) -> None:
    whole = write(NEW, path.with_name("other.lmdb"))
    size = whole.stat().st_size
    limit = {"lmdb": size - size % 4096, "all but one byte": size - 1}.get(str(limit), limit)
    whole.unlink()
    write(OLD, path)

    def write_with_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # type: ignore[arg-type]
        with pytest.raises(StoreWriteError, match="the store that was there is unchanged") as caught:
            write(NEW, path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, OSError)

    assert end_of_fork(write_with_limit, measured=False) == "returned"
    assert content(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]


@pytest.mark.parametrize("at", [0, 1, 99])
def test_an_error_in_the_samples_goes_through_and_leaves_the_old_store(path: Path, at: int) -> None:
    def samples() -> Iterator[bytes]:
        yield from NEW[:at]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(samples(), path)
    assert not list(path.parent.iterdir())
    write(OLD, path)
    with pytest.raises(ZeroDivisionError):
        write(samples(), path)
    assert content(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]


def test_a_second_writer_at_the_same_path_is_told(path: Path) -> None:
    def second() -> None:
        with pytest.raises(StoreWriteError, match="Another writer is at work"):
            write(OLD, path)

    with LMDBWriter(path) as first:
        first.write(NEW[0])
        second()
        assert end_of_fork(second) == "returned"
        path.with_name("link.lmdb").symlink_to(path)
        with pytest.raises(StoreWriteError, match="Another writer is at work"):
            write(OLD, path.with_name("link.lmdb"))
        write(OLD, path.with_name("a.lmdb.other"))  # a neighbour whose name begins alike is another store
        first.write(NEW[1])
    assert content(path) == NEW[:2]
    assert content(path.with_name("a.lmdb.other")) == OLD
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.lmdb", "a.lmdb.other", "link.lmdb"]


def test_a_store_is_replaced_while_it_is_read(path: Path) -> None:
    old = LMDBDataset(write(OLD, path))
    assert old[3] == OLD[3]
    write(NEW, path)
    assert old[4] == OLD[4]
    assert content(path) == NEW


def test_the_map_grows_until_the_samples_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_appender, "_FIRST_MAP_BYTES", 1 << 15)
    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", 1 << 16)
    samples = [os.urandom(70_000) for _ in range(40)]
    assert content(write(samples, path)) == samples
    assert path.stat().st_size < 1.1 * sum(map(len, samples))


@pytest.mark.parametrize("commit_bytes", [1, 10_000, 1 << 30])
def test_commits_of_any_size_give_the_same_samples(
    path: Path, commit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", commit_bytes)
    assert content(write(NEW, path)) == NEW


def test_folders_are_made_and_files_that_are_no_store_are_kept(path: Path) -> None:
    deep = path.parent / "x" / "y" / "a.lmdb"
    assert write(NEW, deep) == deep
    with pytest.raises(StoreWriteError, match="is a folder"):
        write(NEW, deep.parent)
    path.write_text("my thesis")
    with pytest.raises(StoreWriteError, match="is not replaced"):
        write(NEW, path)
    assert path.read_text() == "my thesis"
    with pytest.raises(StoreWriteError, match="could not be written"):
        write(NEW, path / "below.lmdb")


def test_the_file_mode_follows_the_umask(path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(NEW, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_writer_is_used_once_and_inside_its_block(path: Path) -> None:
    writer = LMDBWriter(path)
    with pytest.raises(RuntimeError, match="with LMDBWriter"):
        writer.write(1)
    with writer:
        assert writer.samples == 0
        writer.write(1)
        assert writer.samples == 1
    with pytest.raises(RuntimeError, match="with LMDBWriter"):
        writer.write(1)
    with pytest.raises(RuntimeError, match="used already"), writer:
        pass
    assert content(path) == [1]


@pytest.mark.parametrize("value", [1e6, "8192", None, 4096.0])
def test_block_bytes_is_an_integer(path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=f"block_bytes must be an int, got {value!r}"):
        write_lmdb(NEW, path, block_bytes=value)
    write_lmdb(NEW, path, block_bytes=np.int64(8192))  # type: ignore[arg-type]
    assert content(path) == NEW
    assert verify_lmdb(path).block_bytes == 8192


@pytest.mark.parametrize("value", [0, -1, 4095, 2**30])
def test_block_bytes_has_bounds(path: Path, value: int) -> None:
    with pytest.raises(ValueError, match=f"from 4096 to .* got {value}"):
        write_lmdb(NEW, path, block_bytes=value)


def test_the_progress_bar_goes_to_stderr(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lmdb(NEW, path, progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "100/100" in captured.err


@pytest.mark.parametrize("fault", [StoreWriteError("full"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize(("of", "where"), [(BlockAppender, "_commit"), (LMDBWriter, "_next_block")])
@pytest.mark.parametrize("old", [True, False])
def test_a_failed_write_that_is_caught_is_not_published(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, of: type, where: str, old: bool
) -> None:
    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", 1)
    if old:
        write(OLD, path)
    real = getattr(of, where)

    def fails_once(self: Any, *arguments: Any) -> None:
        monkeypatch.setattr(of, where, real)
        raise fault

    monkeypatch.setattr(of, where, fails_once)
    refused = 0
    with pytest.raises(StoreWriteError, match="not published"), LMDBWriter(path, block_bytes=4096) as writer:  # noqa: PT012
        for sample in NEW:
            try:
                writer.write(sample)
            except (StoreWriteError, KeyboardInterrupt, MemoryError):
                refused += 1
    assert refused >= len(NEW) - 5  # a thread tells it a few blocks late; then all that comes is refused
    if old:
        assert content(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"] * old


def test_only_stores_and_empty_files_are_replaced(path: Path) -> None:
    with lmdb.open(str(path), subdir=False) as foreign, foreign.begin(write=True) as transaction:
        transaction.put(b"precious", b"data")
    os.remove(f"{path}-lock")  # noqa: PTH107
    os.mkfifo(path.with_name("pipe"))
    path.with_name("loop").symlink_to("loop")
    write(OLD, path.with_name("cut"))
    os.truncate(path.with_name("cut"), 9000)
    path.with_name("short").write_bytes(b"SPKSEAL")
    if os.geteuid() == 0:
        os.mknod(path.with_name("device"), 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    before = {file.name: file.lstat() for file in path.parent.iterdir()}
    assert len(before) >= 5
    for name in before:
        with pytest.raises(StoreWriteError, match=r"is not replaced"):
            write(NEW, path.with_name(name))
    assert {file.name: file.lstat() for file in path.parent.iterdir()}.keys() == before.keys()
    for name, status in before.items():
        assert path.with_name(name).lstat().st_ino == status.st_ino
    path.with_name("empty").touch()
    path.with_name("link").symlink_to("target")
    for name in ("empty", "link"):
        assert content(write(NEW, path.with_name(name))) == NEW
    assert path.with_name("link").is_symlink()
    with pytest.raises(StoreWriteError, match="could not be written"):
        write(NEW, path.with_name("x" * 300))


def test_a_file_that_comes_while_a_store_is_written_is_kept(path: Path) -> None:
    with pytest.raises(StoreWriteError, match="is not replaced"), LMDBWriter(path) as writer:  # noqa: PT012
        writer.write(1)
        path.write_text("my thesis")
    assert path.read_text() == "my thesis"
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]


def test_threads_write_whole_samples(path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with LMDBWriter(path, block_bytes=4096) as writer, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: writer.write((i, np.full(50, i))), range(3000)))
    finally:
        sys.setswitchinterval(interval)
    samples = content(path)
    assert sorted(number for number, _ in samples) == list(range(3000))
    assert all((array == number).all() for number, array in samples)


@pytest.mark.parametrize("leave", ["exit", "raise", "normally"])
def test_a_forked_child_that_leaves_the_block_takes_nothing_with_it(path: Path, leave: str) -> None:
    write(OLD, path)
    main = os.getpid()
    try:
        with LMDBWriter(path, block_bytes=4096) as writer:
            for sample in NEW[:50]:
                writer.write(sample)
            child = os.fork()
            if child == 0:
                with pytest.raises(RuntimeError, match="belongs to the process that was forked"):
                    writer.write(NEW[0])
                if leave == "exit":
                    sys.exit(0)
                if leave == "raise":
                    raise ZeroDivisionError
            else:
                _, status = os.waitpid(child, 0)
                assert content(path) == OLD
                for sample in NEW[50:]:
                    writer.write(sample)
    finally:
        if os.getpid() != main:
            os._exit(7)
    assert os.waitstatus_to_exitcode(status) == 7
    assert content(path) == NEW
    assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]


def test_a_process_started_inside_the_block_takes_nothing_with_it(path: Path) -> None:
    with LMDBWriter(path) as writer:
        writer.write(1)
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        writer.write(2)
    assert content(path) == [1, 2]
