"""One open environment per process and file, also across forks."""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib.util
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.store import lmdb_store
from lightning_speedkit.errors import StoreError
from tests.data.forked import end_of_fork, exit_unmeasured, stop_coverage
from tests.data.processes import wait_until

COUNT = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lmdb(((torch.full((500,), i), i) for i in range(COUNT)), tmp_path / "a.lmdb", block_bytes=8192)


def test_a_file_is_open_once_and_as_long_as_it_is_used(path: Path, tmp_path: Path) -> None:
    def opened() -> int:
        return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())

    first, second = LMDBDataset(path), LMDBDataset(path)
    assert opened() == 0  # nothing is held before the first read, so that workers can be started
    first[0], second[0]
    assert opened() == 2  # LMDB's, and the one that tells whether the file was changed
    assert lmdb_store._file_id(path.stat()) in lmdb_store._table
    first.close()
    first.close()
    assert second[1][1] == 1
    del second
    gc.collect()
    assert opened() == 0
    assert lmdb_store._file_id(path.stat()) not in lmdb_store._table
    assert first[2][1] == 2
    first.close()


def test_the_users_own_environment_over_the_file_is_named(path: Path) -> None:
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False):
        try:
            assert LMDBDataset(path)[1][1] == 1  # a binding of version 1 opens it twice
        except StoreError as error:
            assert "already open" in str(error)  # noqa: PT017


def test_a_fork_of_a_fork_and_a_user_in_each(path: Path) -> None:
    dataset = LMDBDataset(path)
    assert dataset[1][1] == 1

    def child() -> None:
        other = LMDBDataset(path)
        assert (dataset[2][1], other[2][1]) == (2, 2)
        assert end_of_fork(lambda: (dataset[3], other[3])) == "returned"
        dataset.close()
        assert other[4][1] == 4
        assert dataset[4][1] == 4

    assert end_of_fork(child) == "returned"
    assert dataset[5][1] == 5


def test_a_store_replaced_while_it_is_opened_is_opened_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lmdb_store.open_engine

    def replaced_meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(lmdb_store, "open_engine", real)
        write_lmdb([(torch.zeros(1), -1)], path)
        return real(*arguments, **options)

    monkeypatch.setattr(lmdb_store, "open_engine", replaced_meanwhile)
    store = lmdb_store.open_store(path)
    try:
        assert store.index.samples == store.seal.samples == 1
        assert store.read(0)[1] == -1
    finally:
        store.close()
    assert store.closed


def test_users_are_counted(path: Path) -> None:
    first, second = lmdb_store.open_store(path), lmdb_store.open_store(path)
    assert first is second
    first.close()
    assert second.read(3)[1] == 3
    second.close()
    assert second.closed
    third = lmdb_store.open_store(path)
    assert third is not second
    third.close()


def fork_while_a_thread_opens(path: Path) -> None:
    """Forks between the opening of an environment and its entry in the table."""
    stop_coverage()  # its own locks are not made for a fork beside a running thread
    opening, forking = threading.Event(), threading.Event()
    real = lmdb_store.open_engine

    def slow(*arguments: Any, **options: Any) -> Any:
        engine = real(*arguments, **options)
        lmdb_store.open_engine = real
        opening.set()
        forking.wait(0.3)  # nobody sets it: the fork has to be under way, and there is no sign of that
        return engine

    lmdb_store.open_engine = slow
    dataset = LMDBDataset(path)
    thread = threading.Thread(target=lambda: dataset[0])
    thread.start()
    assert opening.wait(30)
    assert end_of_fork(lambda: (LMDBDataset(path)[1], dataset[2]), measured=False) == "returned"
    thread.join()
    assert dataset[3][1] == 3


def test_a_fork_waits_for_a_thread_that_opens_the_store(path: Path) -> None:
    """Else the child inherits an environment that is in no table, and LMDB refuses to open the file a second time."""
    assert end_of_fork(lambda: fork_while_a_thread_opens(path), measured=False) == "returned"


def another_lmdb_store() -> Any:
    """The module once more, so that what it registers for forks comes after what the caller has registered."""
    spec = importlib.util.spec_from_file_location("another_lmdb_store", lmdb_store.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interrupt_in_the_hooks_of_a_fork(path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_parent=_thread.interrupt_main, after_in_child=_thread.interrupt_main)
    store = another_lmdb_store()
    inherited = store.open_store(path)
    with contextlib.suppress(KeyboardInterrupt):  # dropped, or here, as the interpreter likes
        os.fork()
    opened: list[Any] = []
    threading.Thread(target=lambda: opened.append(store.open_store(path)), daemon=True).start()
    assert wait_until(lambda: bool(opened), 20)
    assert opened[0].read(7)[1] == 7
    if os.getpid() == inherited.process:
        assert opened[0] is inherited
        assert os.wait()[1] == 0
    else:
        assert opened[0].process == os.getpid()
        assert inherited.closed
        exit_unmeasured(0)


def test_an_interrupt_in_the_moment_of_a_fork_holds_nothing_up(path: Path) -> None:
    """It comes before the first of the functions that are called on either side, and CPython drops what they raise."""
    assert end_of_fork(lambda: interrupt_in_the_hooks_of_a_fork(path), measured=False) == "returned"


def test_a_store_that_the_collector_closes_while_it_is_looked_up_is_opened_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = LMDBDataset(path)
    assert dataset[3][1] == 3

    class Collecting(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            dataset.close()
            return found

    monkeypatch.setattr(lmdb_store, "_table", Collecting(lmdb_store._table))
    store = lmdb_store.open_store(path)
    assert not store.closed
    assert store.read(5)[1] == 5
    store.close()
    assert store.closed
