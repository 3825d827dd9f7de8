"""Copying one file: in order, again after a fault, and from where it stopped."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_speedkit.data.staging import resumable_copy
from lightning_speedkit.data.staging.resumable_copy import copy_file, crc_of_file
from lightning_speedkit.data.staging.staged_record import CopiedFile
from lightning_speedkit.data.staging.staging_source import SourceFile

CONTENT = random.Random(3).randbytes(100_001)
CHUNK, SAVE = 1000, 10_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_copy, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(resumable_copy, "_SAVE_BYTES", SAVE)
    monkeypatch.setattr(resumable_copy, "_PAUSE_SECONDS", 0.0)


class Far:
    """A source that notes what it is asked for, and fails as it is told."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.failures: dict[int, list[Exception | int]] = {}  # by start: an error, or so many bytes only
        self.breaks_at: int | None = None

    def read(self, start: int, size: int) -> bytes:
        self.asked.append((start, size))
        time.sleep(random.random() / 2000)
        if self.failures.get(start):
            failure = self.failures[start].pop(0)
            if isinstance(failure, Exception):
                raise failure
            size = failure
        return self.content[start : start + size]

    def stream(self) -> Iterator[bytes]:
        for start in range(0, len(self.content), 777):
            if self.breaks_at is not None and start >= self.breaks_at:
                raise TimeoutError("no answer")
            yield self.content[start : start + 777]

    def file(self, *, parts: bool = True, size: int | None = len(CONTENT)) -> SourceFile:
        return SourceFile("a.bin", size, {}, self.read if parts else None, self.stream, readers=3)


def _copy(file: SourceFile, target: Path, state: CopiedFile) -> tuple[list[tuple[int, int]], list[int]]:
    saved: list[tuple[int, int]] = []
    moved: list[int] = []
    copy_file(file, target, state, save=lambda: saved.append((state.copied, state.crc32)), moved=moved.append)
    return saved, moved


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, len(CONTENT)])
def test_every_byte_arrives_in_its_place(tmp_path: Path, size: int, parts: bool) -> None:
    far, state = Far(CONTENT[:size]), CopiedFile("a.bin", size)
    saved, moved = _copy(far.file(parts=parts, size=size), tmp_path / "a", state)
    assert (tmp_path / "a").read_bytes() == CONTENT[:size]
    assert (state.copied, state.crc32) == (size, zlib.crc32(CONTENT[:size]))
    assert state.mtime_ns == (tmp_path / "a").stat().st_mtime_ns
    assert sum(moved) == size
    assert saved[-1] == (size, zlib.crc32(CONTENT[:size]))
    assert all(crc == zlib.crc32(CONTENT[:count]) for count, crc in saved)


def test_progress_is_saved_between(tmp_path: Path) -> None:
    saved, _ = _copy(Far().file(), tmp_path / "a", CopiedFile("a.bin", len(CONTENT)))
    assert [count for count, _ in saved] == [*range(SAVE, len(CONTENT), SAVE), len(CONTENT)]


def test_a_copy_goes_on_from_what_is_known_to_be_on_the_disk(tmp_path: Path) -> None:
    target, known = tmp_path / "a", 20_000
    target.write_bytes(CONTENT[:known] + b"what was written later, and may be anything")
    state = CopiedFile("a.bin", len(CONTENT), known, zlib.crc32(CONTENT[:known]))
    far = Far()
    _, moved = _copy(far.file(), target, state)
    assert target.read_bytes() == CONTENT
    assert state.crc32 == zlib.crc32(CONTENT)
    assert min(start for start, _ in far.asked) == known
    assert sum(size for _, size in far.asked) == len(CONTENT) - known
    assert moved[0] == known


@pytest.mark.parametrize("left", [None, b"", CONTENT[:19_999]])
def test_a_copy_that_lost_bytes_begins_anew(tmp_path: Path, left: bytes | None) -> None:
    target = tmp_path / "a"
    if left is not None:
        target.write_bytes(left)
    far = Far()
    _copy(far.file(), target, CopiedFile("a.bin", len(CONTENT), 20_000, zlib.crc32(CONTENT[:20_000])))
    assert target.read_bytes() == CONTENT
    assert min(start for start, _ in far.asked) == 0


def test_a_server_without_parts_begins_anew(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(CONTENT[:20_000])
    state = CopiedFile("a.bin", len(CONTENT), 20_000, zlib.crc32(CONTENT[:20_000]))
    _copy(Far().file(parts=False), target, state)
    assert target.read_bytes() == CONTENT
    assert state.crc32 == zlib.crc32(CONTENT)


@pytest.mark.parametrize("failure", [TimeoutError("slow"), OSError("reset"), RuntimeError("of a library"), 17, 0])
def test_a_fault_that_passes_is_tried_again(tmp_path: Path, failure: Exception | int) -> None:
    far = Far()
    far.failures = {3000: [failure] * 3, 50_000: [failure]}
    _copy(far.file(), tmp_path / "a", CopiedFile("a.bin", len(CONTENT)))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert far.asked.count((3000, CHUNK)) == 4


def test_a_fault_that_stays_ends_the_copy_and_keeps_what_was_saved(tmp_path: Path) -> None:
    far, state = Far(), CopiedFile("a.bin", len(CONTENT))
    far.failures = {50_000: [TimeoutError("slow")] * 4}
    with pytest.raises(ConnectionError, match=r"a\.bin could not be read in 4 attempts: TimeoutError: slow"):
        _copy(far.file(), tmp_path / "a", state)
    assert 0 < state.copied <= 50_000
    assert zlib.crc32((tmp_path / "a").read_bytes()[: state.copied]) == state.crc32

    again = Far()
    _copy(again.file(), tmp_path / "a", state)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert min(start for start, _ in again.asked) >= 40_000


def test_a_source_that_went_away_is_not_asked_again(tmp_path: Path) -> None:
    far = Far()
    far.failures = {0: [FileNotFoundError("a.bin")]}
    with pytest.raises(ConnectionError, match="went away while it was copied"):
        _copy(far.file(), tmp_path / "a", CopiedFile("a.bin", len(CONTENT)))
    assert far.asked.count((0, CHUNK)) == 1


def test_a_stream_that_breaks_off_is_told(tmp_path: Path) -> None:
    far = Far()
    far.breaks_at = 30_000
    with pytest.raises(ConnectionError, match=r"a\.bin broke off: TimeoutError: no answer"):
        _copy(far.file(parts=False), tmp_path / "a", CopiedFile("a.bin", len(CONTENT)))


def test_a_stream_that_is_too_short_is_not_taken_for_whole(tmp_path: Path) -> None:
    state = CopiedFile("a.bin", len(CONTENT))
    with pytest.raises(ConnectionError, match=f"has {len(CONTENT):,} bytes, but 500 were sent"):
        _copy(Far(CONTENT[:500]).file(parts=False), tmp_path / "a", state)
    assert (state.copied, state.mtime_ns) == (0, 0)


def test_a_size_that_was_not_told_is_learned(tmp_path: Path) -> None:
    state = CopiedFile("a.bin", None)
    _copy(Far().file(parts=False, size=None), tmp_path / "a", state)
    assert state.size == len(CONTENT)


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    assert crc_of_file(tmp_path / "a") == zlib.crc32(CONTENT)
