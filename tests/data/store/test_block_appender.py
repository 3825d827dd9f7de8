"""Blocks that are appended in the background: order, checksums, large ones, and errors of the threads."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path
from typing import Any

import lmdb
import pytest

from lightning_speedkit.data.store import block_appender
from lightning_speedkit.data.store.block_appender import BlockAppender
from tests.data.forked import end_of_fork


def fill(appender: BlockAppender, content: bytes) -> None:
    memory = appender.buffer(len(content))
    assert len(memory) >= len(content)
    memory[: len(content)] = content
    appender.append(memory, len(content))


@pytest.mark.parametrize(
    "sizes", [[4096] * 9, [0, 1, 4096, 0], [9000, 10, 3_000_000, 10, 9000, 4096], [1_100_000] * 70]
)
@pytest.mark.parametrize("commit_bytes", [1, 1 << 20])
def test_blocks_are_stored_in_order_with_their_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], commit_bytes: int
) -> None:
    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", commit_bytes)
    blocks = [os.urandom(size) for size in sizes]
    appender = BlockAppender(tmp_path / "a", 4096)
    for block in blocks:
        fill(appender, block)
    appender.wait()
    assert appender.crcs == [zlib.crc32(block) for block in blocks]
    assert appender.page_bytes in (4096, 16384, 32768)
    appender.finish([(b"crc", b"x" * 5000), (b"meta", b"")])
    appender.close()
    appender.close()
    with lmdb.open(str(tmp_path / "a"), subdir=False, readonly=True, lock=False) as engine, engine.begin() as reader:
        found = list(reader.cursor())
    numbered = [(number.to_bytes(8, "big"), block) for number, block in enumerate(blocks)]
    assert found == [*numbered, (b"crc", b"x" * 5000), (b"meta", b"")]
    assert threading.active_count() == 1 or not any("_put_all" in thread.name for thread in threading.enumerate())


def test_a_buffer_is_not_handed_out_again_before_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_store = threading.Event()
    real = BlockAppender._take

    def slow(self: BlockAppender, block: memoryview) -> None:
        assert may_store.wait(60)
        real(self, block)

    monkeypatch.setattr(BlockAppender, "_take", slow)
    appender = BlockAppender(tmp_path / "a", 4096)
    memories = [appender.buffer(0) for _ in range(3)]
    for number, memory in enumerate(memories):
        memory[:] = bytes([number]) * 4096
        appender.append(memory, 4096)
    got: list[memoryview] = []
    asking = threading.Thread(target=lambda: got.append(appender.buffer(0)))
    asking.start()
    asking.join(0.05)
    assert got == []
    may_store.set()
    asking.join(60)
    assert got[0].obj is memories[0].obj
    appender.wait()
    assert appender.crcs == [zlib.crc32(bytes([number]) * 4096) for number in range(3)]
    appender.close()


@pytest.mark.parametrize("fault", [lmdb.DiskError("full"), OSError(5, "broken"), MemoryError()])
@pytest.mark.parametrize("where", ["_take", "sync"])
def test_an_error_of_a_thread_is_raised_by_every_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, where: str
) -> None:
    def fails(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", 1)
    monkeypatch.setattr(block_appender, "_SYNC_BYTES", 1)
    if where == "sync":
        monkeypatch.setattr(block_appender, "_sync_file", fails)
    else:
        monkeypatch.setattr(BlockAppender, "_take", fails)
    appender = BlockAppender(tmp_path / "a", 4096)
    fill(appender, b"block")
    for call in (appender.wait, lambda: fill(appender, b"block"), lambda: appender.finish([]), appender.wait):
        with pytest.raises(type(fault)) as caught:
            call()
        assert caught.value is fault
    appender.close()


def test_closing_in_the_middle_waits_for_the_threads_and_stores_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_appender, "_COMMIT_BYTES", 1)
    before = set(Path("/proc/self/fd").iterdir())
    for count in range(8):
        appender = BlockAppender(tmp_path / "a", 4096)
        for _ in range(count):
            fill(appender, b"x" * 4096)
        appender.close()
        with pytest.raises(ValueError, match="closed"):
            fill(appender, b"x")
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert [thread for thread in threading.enumerate() if "_all" in thread.name] == []


def test_a_process_that_ends_inside_is_not_held_up(tmp_path: Path) -> None:
    def leave_it_open() -> None:
        appender = BlockAppender(tmp_path / "a", 4096)
        fill(appender, b"x" * 4096)

    assert end_of_fork(leave_it_open) == "returned"
