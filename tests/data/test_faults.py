"""Faults from outside: killed writers, bits that flip, full disks, rivals, folders that cannot be written or locked.

Each test says what must be left: the old store or the whole new one, an error of ours with the place, a process alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lmdb
import numpy as np
import pytest

from lightning_speedkit.data import LMDBDataset, LMDBWriter, verify_lmdb, write_lmdb
from lightning_speedkit.data.store import block_appender
from lightning_speedkit.data.store.lmdb_format import read_seal
from lightning_speedkit.data.store.lmdb_pages import read_lmdb_meta, walk_tree
from lightning_speedkit.errors import StoreCorruptError, StoreError, StoreWriteError
from tests.data.forked import end_of_fork, exit_unmeasured, kill_self
from tests.data.samples import same

SECONDS = 120.0
GENERATIONS = [[bytes([number]) * (2000 + number)] * 30 for number in range(2)]


def write(samples: Any, path: Path) -> Path:
    return write_lmdb(samples, path, block_bytes=4096)


def read_all(path: Path) -> list[Any]:
    dataset = LMDBDataset(path)
    try:
        return dataset.__getitems__(range(len(dataset)))
    finally:
        dataset.close()


def refusal(action: Callable[[], Any]) -> StoreError | None:
    """The error of ours that the action raises, if it raises one."""
    try:
        action()
    except StoreError as error:
        return error
    return None


def content(path: Path) -> list[Any]:
    verify_lmdb(path)
    return read_all(path)


@contextlib.contextmanager
def forked(function: Callable[[], Any]) -> Iterator[int]:
    """A forked child that runs the function; it must end well by the end of the block, and is killed after a while."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(SECONDS))
            function()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            exit_unmeasured(code)
    try:
        yield child
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# A writer that is killed ----------------------------------------------------------------------------------------------


def run_lines(action: Callable[[], Any], at: int) -> int:
    """Run it and count the lines of the package that are executed, in all threads; kill the process at line ``at``."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "lightning_speedkit" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                kill_self()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return lines


def replace(path: Path, number: int) -> None:
    block_appender._COMMIT_BYTES = 20_000  # some commits
    write(GENERATIONS[number], path)


def number_of_lines(path: Path) -> int:
    reading, writing = os.pipe()
    child_says = lambda: os.write(writing, str(run_lines(lambda: replace(path, 0), at=-1)).encode())  # noqa: E731
    assert end_of_fork(child_says, measured=False) == "returned"
    os.close(writing)
    with os.fdopen(reading) as file:
        return int(file.read())


def test_a_writer_killed_at_any_of_fifty_lines_leaves_a_whole_store(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    lines = number_of_lines(path)
    source = random.Random(11)
    publishing = [lines - before for before in (0, 5, 10, 20, 40, 60, 80, 100, 150, 200)]
    moments = [*(source.randrange(1, lines) for _ in range(40)), *publishing]
    current, seen = 0, set()
    for moment in moments:
        to = 1 - current
        end = end_of_fork(lambda at=moment, to=to: run_lines(lambda: replace(path, to), at=at), measured=False)
        found = content(path)
        assert found in GENERATIONS, moment
        number = GENERATIONS.index(found)
        seen.add((end, number != current))
        current = number
    print(seen)
    assert ("SIGKILL", False) in seen
    write(GENERATIONS[1 - current], path)  # what the dead ones left holds nobody up
    assert content(path) == GENERATIONS[1 - current]
    assert [file.name for file in tmp_path.iterdir()] == ["a.lmdb"]


def test_a_writer_killed_from_outside_at_any_of_fifty_times_leaves_a_whole_store(tmp_path: Path) -> None:
    path = write(GENERATIONS[0], tmp_path / "a.lmdb")
    start = time.perf_counter()
    assert end_of_fork(lambda: replace(path, 0), measured=False) == "returned"
    seconds = time.perf_counter() - start
    source = random.Random(12)
    current, killed = 0, 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            replace(path, 1 - current)
            exit_unmeasured(0)
        time.sleep(source.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        in_time = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        killed += in_time
        seconds *= 1.1 if in_time else 0.8  # whatever else the machine does meanwhile
        found = content(path)
        assert found in GENERATIONS
        current = GENERATIONS.index(found)
    print("killed", killed)
    assert killed > 5
    write(GENERATIONS[1 - current], path)
    assert content(path) == GENERATIONS[1 - current]
    assert [file.name for file in tmp_path.iterdir()] == ["a.lmdb"]


# Bits that flip -------------------------------------------------------------------------------------------------------


def wide_samples() -> list[dict[str, Any]]:
    """So many fields, of so many shapes, that ``meta``, ``index`` and ``crc`` are too large for LMDB's own pages."""
    return [{f"field {f}": np.full(20 + (i * f) % 140, i, np.int16) for f in range(20)} for i in range(510)]


def regions(path: Path) -> dict[str, tuple[list[tuple[int, int]], str]]:
    """The parts of the file, and what the error says when one is damaged."""
    with path.open("rb") as file:
        meta = read_lmdb_meta(file.fileno())
        assert meta is not None
        seal = read_seal(file.fileno(), path)
        records = {record.key: record.span for record in walk_tree(file.fileno(), meta)[1]}
    tree = seal.tree_spans()
    found = {name: ([records[name.encode()]], f"record '{name}'") for name in ("meta", "index", "crc")}
    for spans, _ in found.values():
        assert all(end <= start or stop <= first for start, stop in tree for first, end in spans)
    found["data"] = ([records[block.to_bytes(8, "big")] for block in range(seal.blocks)], r"block (\d+) ")
    found["tree"] = (tree, "LMDB's own pages|not an LMDB file")
    found["runs"] = ([(seal.lmdb_bytes, seal.file_bytes - 128)], "LMDB's own pages|LMDB pages")
    found["footer"] = ([(seal.file_bytes - 128, seal.file_bytes)], "seal|format|LMDB file")
    return found


def flip_bits(path: Path) -> None:
    expected, source = read_all(path), random.Random(13)
    for name, (spans, words) in regions(path).items():
        for _ in range(12):
            start, end = source.choice(spans)
            position, bit = source.randrange(start, end), 1 << source.randrange(8)
            with path.open("r+b", buffering=0) as file:
                before = os.pread(file.fileno(), 1, position)
                os.pwrite(file.fileno(), bytes([before[0] ^ bit]), position)
                with pytest.raises(StoreError) as by_verifying:
                    verify_lmdb(path)
                assert re.search(words, str(by_verifying.value)), (name, position, by_verifying.value)
                with pytest.raises(StoreError) as by_reading:
                    read_all(path)
                assert str(by_reading.value) == str(by_verifying.value), name
                if name == "data":
                    first, last = map(int, re.findall(r"samples (\d+) to (\d+) are", str(by_verifying.value))[0])
                    dataset = LMDBDataset(path)
                    for sample in range(len(dataset)):
                        if first <= sample <= last:
                            with pytest.raises(StoreCorruptError, match=f"samples {first} to {last} "):
                                dataset[sample]
                        else:
                            assert same(dataset[sample], expected[sample])
                    dataset.close()
                os.pwrite(file.fileno(), before, position)
    assert len(content(path)) == len(expected)


def test_a_flipped_bit_is_found_and_its_place_named(tmp_path: Path) -> None:
    path = write(wide_samples(), tmp_path / "a.lmdb")
    assert verify_lmdb(path).blocks > 500
    assert end_of_fork(lambda: flip_bits(path)) == "returned"


# A disk that is full --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    done = subprocess.run([mount, *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(kind: str, folder: Path, image: Path) -> Iterator[None]:
    size = 2 << 20
    if kind == "tmpfs":
        arguments = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    else:
        tool = shutil.which("mkfs.ext4")
        if tool is None:
            pytest.skip("there is no mkfs.ext4")
        image.write_bytes(bytes(size))
        subprocess.run([tool, "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
        arguments = ["-o", "loop", str(image)]
    with mounted(folder, *arguments):
        yield


def leave_room(ballast: Path, room: int) -> None:
    """Fill the disk, but for about so many bytes."""
    size = 0
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            size += file.write(bytes(4096))
    with ballast.open("rb") as file, contextlib.suppress(OSError):
        os.fsync(file.fileno())
    os.truncate(ballast, max(size - room, 0))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_leaves_the_old_store(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    new = [os.urandom(3000) for _ in range(100)]
    with small_disk(kind, disk, tmp_path / "image"):
        path = write(GENERATIONS[0], disk / "a.lmdb")
        needed = write(new, tmp_path / "whole.lmdb").stat().st_size
        ballast = disk / "ballast"
        refused = 0
        for room in (0, 8192, needed // 2, needed - 20_000, needed - 4096, needed - 1):
            leave_room(ballast, room)
            error = refusal(lambda: write(new, path))
            if error is None:  # the file system had kept a little back
                assert content(path) == new
                ballast.unlink()
                write(GENERATIONS[0], path)
            else:
                refused += 1
                assert re.search(r"(No space|Input/output).*the store that was there is unchanged", str(error)), error
                assert content(path) == GENERATIONS[0]
            assert {file.name for file in disk.iterdir()} - {"lost+found", "ballast"} == {"a.lmdb"}
            ballast.unlink(missing_ok=True)
        assert refused >= 4
        assert content(write(new, path)) == new


# Others at work -------------------------------------------------------------------------------------------------------


def test_two_processes_that_write_one_store_at_once(tmp_path: Path) -> None:
    path = write(GENERATIONS[0], tmp_path / "a.lmdb")

    def write_often(number: int) -> None:
        """Refused for as long as the other goes on without a pause, at worst, and then alone."""
        pauses, written, end = random.Random(number), 0, time.monotonic() + SECONDS / 2
        while written < 10:
            error = refusal(lambda: write(GENERATIONS[number], path))
            if error is None:
                written += 1
                continue
            assert "Another writer is at work" in str(error)
            assert time.monotonic() < end, f"{written} of 10"
            time.sleep(pauses.uniform(0, 0.01))

    with forked(lambda: write_often(0)), forked(lambda: write_often(1)):
        for _ in range(10):
            assert content(path) in GENERATIONS
    assert content(path) in GENERATIONS
    assert [file.name for file in tmp_path.iterdir()] == ["a.lmdb"]


def test_the_second_writer_in_another_process_is_told_while_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    reading, writing = os.pipe()

    def hold() -> None:
        with LMDBWriter(path) as writer:
            writer.write(b"first")
            os.write(writing, b"x")
            while not path.with_name("told").exists():
                time.sleep(0.01)

    with forked(hold):
        assert os.read(reading, 1) == b"x"
        with pytest.raises(StoreWriteError, match="Another writer is at work"):
            write([b"second"], path)
        path.with_name("told").touch()
    assert content(path) == [b"first"]


def test_readers_of_another_process_see_whole_stores_while_twenty_are_published(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    last = 20

    def publish(number: int) -> None:
        write([(number, bytes([number]) * (1000 + 100 * number))] * (5 + number), path)

    def check(samples: list[Any]) -> int:
        number: int = samples[0][0]
        assert samples == [(number, bytes([number]) * (1000 + 100 * number))] * (5 + number)
        return number

    def read_anew() -> None:
        seen = 0
        while seen < last:
            found: list[Any] = []
            error = refusal(lambda into=found: into.extend(read_all(path)))
            if error is not None:  # published between the two steps of opening it
                assert "the file was replaced since" in str(error)
                continue
            assert check(found) >= seen
            seen = check(found)

    def verify_anew() -> None:
        samples = 5
        while samples < 5 + last:
            found = verify_lmdb(path).samples
            assert found >= samples
            samples = found

    def read_the_first() -> None:
        dataset = LMDBDataset(path)
        assert check(dataset.__getitems__(range(len(dataset)))) == 0
        os.write(writing, b"x")
        while verify_lmdb(path).samples < 5 + last:
            assert check(dataset.__getitems__(range(len(dataset)))) == 0
        assert check(dataset.__getitems__(range(len(dataset)))) == 0

    publish(0)
    reading, writing = os.pipe()
    with forked(read_anew), forked(verify_anew), forked(read_the_first):
        assert os.read(reading, 1) == b"x"
        for number in range(1, last + 1):
            publish(number)
            time.sleep(0.005)


# Opened again and again -----------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def open_and_close(path: Path, times: int) -> None:
    for number in range(times):
        dataset = LMDBDataset(path)
        assert dataset[number % 10][0] == number % 10
        if number % 2:
            dataset.close()  # the others are left to the collector


def ten_thousand_cycles(path: Path) -> None:
    open_and_close(path, 500)
    files, memory = sorted(os.listdir("/proc/self/fd")), resident_bytes()  # noqa: PTH208
    open_and_close(path, 10_000)
    assert sorted(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert resident_bytes() < memory + (4 << 20)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no lock file, so no reader slots
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as engine:
        assert engine.info()["num_readers"] == 0


@pytest.mark.timeout(600)
def test_ten_thousand_cycles_leak_nothing(tmp_path: Path) -> None:
    path = write([(i, str(i)) for i in range(10)], tmp_path / "a.lmdb")
    assert end_of_fork(lambda: ten_thousand_cycles(path)) == "returned"


# Folders that cannot be written, or locked ----------------------------------------------------------------------------


def read_but_not_write(path: Path, words: str) -> None:
    names = sorted(file.name for file in path.parent.iterdir())
    assert content(path) == GENERATIONS[0]
    for target in (path, path.with_name("new.lmdb")):
        with pytest.raises(StoreWriteError, match=words) as caught:
            write(GENERATIONS[1], target)
        assert isinstance(caught.value, OSError)
        assert str(target) in str(caught.value)
    assert sorted(file.name for file in path.parent.iterdir()) == names
    assert content(path) == GENERATIONS[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_can_be_read_and_not_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        path = write(GENERATIONS[0], Path(folder, "a.lmdb"))
        Path(folder).chmod(0o555)
        path.chmod(0o444)

        def as_nobody() -> None:
            content(path)  # what is imported late is imported now
            with pytest.raises(StoreWriteError, match="is a folder"):
                write(GENERATIONS[1], path.parent)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            read_but_not_write(path, "Permission denied")

        assert end_of_fork(as_nobody) == "returned"
        Path(folder).chmod(0o755)


def test_a_read_only_mount_can_be_read_and_not_written(tmp_path: Path) -> None:
    path = write(GENERATIONS[0], tmp_path / "real" / "a.lmdb")
    view = tmp_path / "view"
    with mounted(view, "--bind", str(path.parent)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        read_but_not_write(view / "a.lmdb", "Read-only file system")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_can_be_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = write(GENERATIONS[0], tmp_path / "a.lmdb")

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("flock", "lockf", "fcntl"):  # also what LMDB's binding might ask for
        monkeypatch.setattr(fcntl, name, refuse)
    read_but_not_write(path, r"has no locks \(flock\): write on a local disk and copy the file")
