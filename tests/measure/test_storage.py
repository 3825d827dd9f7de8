"""The storage probe: how it reads, that it leaves nothing, and folders that cannot be written."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.facts.storage import StorageSpeed
from lightning_speedkit.measure import storage
from lightning_speedkit.measure.storage import measure_storage
from tests.data.forked import end_of_fork, kill_self


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_LARGEST", 1 << 25)


def _measured(folder: Path) -> StorageSpeed:
    speed = measure_storage(folder, seconds=0.2)
    for rate in (speed.sequential_read_mb_per_second, speed.random_read_mb_per_second):
        assert 0 < rate < math.inf
    return speed


def _refuses_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(storage, "_nameless_file", refuse)


def test_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    speed = _measured(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert speed.folder == str(tmp_path)
    assert speed.probed_file == ""
    assert 1 << 24 <= speed.probed_bytes <= 1 << 25
    assert speed.write_mb_per_second is not None
    assert speed.write_mb_per_second > 0


@pytest.mark.parametrize("tmpfile", [True, False], ids=["O_TMPFILE", "unlinked"])
def test_a_process_that_is_killed_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmpfile: bool
) -> None:
    def killed(*arguments: Any, **settings: Any) -> float:
        kill_self()
        return 0.0

    monkeypatch.setattr(storage, "_random_rate", killed)
    if not tmpfile:
        monkeypatch.delattr(os, "O_TMPFILE")
    assert end_of_fork(lambda: measure_storage(tmp_path, seconds=0.1)) == "SIGKILL"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_file_system_without_nameless_files_is_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if known:
        real = os.open

        def refuses(path: Any, flags: int, *arguments: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *arguments)

        monkeypatch.setattr(os, "open", refuses)
    else:
        monkeypatch.delattr(os, "O_TMPFILE")
    assert _measured(tmp_path).probed_file == ""
    assert list(tmp_path.iterdir()) == []


def test_a_fault_while_reading_is_raised_and_not_taken_for_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "_sequential_rate", lambda *arguments: 1.0)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        measure_storage(tmp_path, seconds=0.1)
    assert list(tmp_path.iterdir()) == []


def test_the_rates_are_those_of_a_clock_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second, so the bytes read can be counted by hand."""
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 24))
    ticks = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    file = os.open(path, os.O_RDONLY)
    try:
        # start 0, then 4 MiB before each of the looks 1 (below 3) and 2, 3 (not below); the end is look 4
        assert storage._sequential_rate(file, 1 << 24, "O_DIRECT", 3.0) == pytest.approx(3 * (1 << 22) / 4)
    finally:
        os.close(file)


def test_every_place_is_read_once_if_the_cache_would_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 24))
    read: list[int] = []
    real = os.preadv

    def noted(file: int, buffers: Any, place: int) -> int:
        read.append(place)
        return real(file, buffers, place)

    monkeypatch.setattr(os, "preadv", noted)
    file = os.open(path, os.O_RDONLY)
    try:
        storage._random_rate(file, 1 << 24, 60.0, again=False)
    finally:
        os.close(file)
    assert sorted(read) == list(range(0, 1 << 24, 1 << 17))
    assert read != sorted(read)


def test_a_folder_that_cannot_be_written_is_read_from_its_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    for name, size in (("small", 1 << 20), ("deep/large", (1 << 24) + (1 << 23)), ("middle", 1 << 24)):
        (tmp_path / name).write_bytes(os.urandom(size))
    _refuses_to_write(monkeypatch)
    speed = _measured(tmp_path)
    assert speed.probed_file == str(tmp_path / "deep" / "large")
    assert speed.probed_bytes == (1 << 24) + (1 << 23)
    assert speed.write_mb_per_second is None


def test_a_folder_with_nothing_to_write_or_read_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").write_bytes(b"x")
    _refuses_to_write(monkeypatch)
    with pytest.raises(OSError, match=r"cannot be written \(Read-only file system\), and holds no file of 16 MiB"):
        measure_storage(tmp_path)


def test_a_disk_that_fills_up_is_told_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"):
        measure_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("advice", [True, False])
def test_without_o_direct_the_fact_says_how_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: bool
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    if not advice:
        monkeypatch.delattr(os, "posix_fadvise")
    assert _measured(tmp_path).method == ("posix_fadvise" if advice else "page cache")


def test_o_direct_reads_past_the_cache(tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        os.pwrite(file, bytes(1 << 20), 0)
        os.fsync(file)
        method = storage._past_the_cache(file)
        assert bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT) == (method == "O_DIRECT")
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (math.inf, ValueError),
        (math.nan, ValueError),
        (True, TypeError),
        ("2", TypeError),
    ],
)
def test_seconds_that_make_no_sense_are_refused(tmp_path: Path, seconds: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"seconds must be .* got"):
        measure_storage(tmp_path, seconds=seconds)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotADirectoryError, match="give the folder"):
        measure_storage(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="is not there"):
        measure_storage(tmp_path / "none")
