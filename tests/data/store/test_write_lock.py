"""The lock that lets one process write at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lightning_speedkit.data.store.write_lock import exclusive_lock, sync_folder
from tests.data.forked import end_of_fork, kill_self


def test_a_lock_waits_for_its_holder_and_outlives_no_process(tmp_path: Path) -> None:
    lock, trace = tmp_path / "x.lock", tmp_path / "trace"
    reading, writing = os.pipe()

    def hold_and_append() -> None:
        with exclusive_lock(lock, wait=True):
            os.write(writing, b"x")
            trace.write_text(trace.read_text() + "child ")

    def hold_and_die() -> None:
        with exclusive_lock(lock, wait=True):
            kill_self()

    assert end_of_fork(hold_and_die) == "SIGKILL"
    trace.write_text("")
    child = os.fork()
    if child == 0:
        hold_and_append()
        os._exit(0)
    assert os.read(reading, 1) == b"x"
    with exclusive_lock(lock, wait=True):  # the child holds it, or has just let it go
        trace.write_text(trace.read_text() + "parent")
    os.waitpid(child, 0)
    assert trace.read_text() == "child parent"
    assert not lock.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("wait", [True, False])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, wait: bool
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(OSError, match=r"no locks \(flock\): write on a local disk") as caught,
        exclusive_lock(tmp_path / "x.lock", wait=wait),
    ):
        pass
    assert caught.value.errno == code
    assert not list(tmp_path.iterdir())


def test_the_folder_itself_is_synced_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))  # noqa: PTH115
    before = len(list(Path("/proc/self/fd").iterdir()))
    sync_folder(tmp_path)
    assert synced == [str(tmp_path)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
