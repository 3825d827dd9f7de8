"""A store's file as one window: every byte in its place, and damage found."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading.store_window import StoreWindow
from lightning_speedkit.errors import StoreCorruptError, StoreError, StoreNotFoundError
from tests.data.forked import end_of_fork
from tests.data.samples import varied_samples

COUNT = 40


def numbered(i: int) -> tuple[torch.Tensor, int]:
    return torch.full((500,), i), i


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lmdb(map(numbered, range(COUNT)), tmp_path / "a.lmdb", block_bytes=8192)


def gathered(window: StoreWindow, samples: list[int]) -> list[list[int]]:
    out = torch.zeros(len(samples), 4000, dtype=torch.uint8)
    window.gather(window.places(np.array(samples)), 4000, out)
    return out.view(torch.int64).tolist()


def test_rows_lie_where_the_samples_say(path: Path) -> None:
    window = StoreWindow(path)
    samples = [39, 0, 0, 17, 4]
    assert gathered(window, samples) == [[i] * 500 for i in samples]
    assert window.file_bytes == path.stat().st_size
    assert window.fingerprint == LMDBDataset(path).fingerprint


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 7, 8, 24, 100, 4096])
def test_rows_from_any_byte(path: Path, row_bytes: int) -> None:
    """Compared with plain slices of the file, up to the last byte of the map."""
    window, chance = StoreWindow(path), random.Random(0)
    data = path.read_bytes()
    end = len(window.bytes) - row_bytes
    for step in (1, 2, 4, 8, 24):
        places = [0, end // step * step, *(chance.randrange(end // step) * step for _ in range(20))]
        for offset in (0, 1, 4):
            memory = torch.zeros(offset + len(places) * row_bytes, dtype=torch.uint8)
            out = memory[offset:].view(len(places), row_bytes)
            window.gather(np.array(places), row_bytes, out)
            assert [bytes(row.tolist()) for row in out] == [data[p : p + row_bytes] for p in places]


def test_the_window_is_that_of_the_file_without_the_seal(path: Path) -> None:
    window, data = StoreWindow(path), path.read_bytes()
    assert bytes(window.bytes) == data[: len(window.bytes)]
    assert not window.bytes.flags.writeable


@pytest.mark.parametrize("part", ["tree", "meta", "index", "crc", "seal", "block"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, part: str) -> None:
    path = write_lmdb(varied_samples(90), tmp_path / "a.lmdb", block_bytes=8192)
    window = StoreWindow(path)
    data = path.read_bytes()
    places = {
        "tree": 4096 + 30,
        "meta": data.index(b'"writer"') + 3,
        "index": data.index(bytes(window.index._arrays["sample_start", -1][:20])) + 2,
        "crc": data.index(np.array(window._crcs, "<u4").tobytes()) + 1,
        "seal": len(data) - 20,
        "block": int(window._starts[1]) + 5,
    }
    damaged = bytearray(data)
    damaged[places[part]] ^= 4
    path.write_bytes(damaged)
    if part != "block":
        with pytest.raises(StoreError):
            StoreWindow(path)
        return
    found = StoreWindow(path)
    first = int(found.index.block_firsts()[1])
    with pytest.raises(StoreCorruptError, match=r"block 1 "):
        found.places(np.array([0, first]))
    found.places(np.array([0, first - 1]))  # the others are as they were


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, -1])
def test_a_file_that_is_cut_short(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(StoreCorruptError):
        StoreWindow(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        StoreWindow(tmp_path / "no.lmdb")


def test_a_changed_and_a_replaced_file(path: Path) -> None:
    window = StoreWindow(path)
    sent = pickle.dumps(window)
    window.check_unchanged()
    write_lmdb([numbered(-i) for i in range(COUNT)], path)
    window.check_unchanged()  # the file that is mapped is still there
    assert gathered(window, [3]) == [[3] * 500]
    with pytest.raises(StoreCorruptError, match="another store than this loader was made for"):
        pickle.loads(sent)
    second = StoreWindow(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StoreCorruptError, match="changed in place"):
        second.check_unchanged()


def test_pickles_are_small_and_map_anew(path: Path) -> None:
    window = StoreWindow(path)
    gathered(window, [1])
    sent = pickle.dumps(window)
    assert len(sent) < 1000
    other = pickle.loads(sent)
    assert gathered(other, [5]) == [[5] * 500]


def test_a_forked_child_reads_on_after_the_parent_has_closed(path: Path) -> None:
    window = StoreWindow(path)
    gathered(window, [1])

    def child() -> None:
        path.unlink()
        window.check_unchanged()
        assert gathered(window, [30, 2]) == [[30] * 500, [2] * 500]

    assert end_of_fork(child) == "returned"
    assert gathered(window, [7]) == [[7] * 500]


def test_many_threads(path: Path) -> None:
    window = StoreWindow(path)

    def work(seed: int) -> bool:
        samples = random.Random(seed).choices(range(COUNT), k=16)
        window.announce(window.index.places(np.array(samples))[0])
        return gathered(window, samples) == [[i] * 500 for i in samples]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def files_and_maps(path: Path) -> tuple[int, int]:
    files = sum(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())
    return files, Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_nothing_is_left_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(30):
        window = StoreWindow(path)
        gathered(window, [1])
        assert files_and_maps(path)[1] == 1
        del window
    assert files_and_maps(path) == (0, 0)
    for broken in ("walk_tree", "check_crc_record", "read_seal"):
        with monkeypatch.context() as patch:
            patch.setattr(f"lightning_speedkit.data.loading.store_window.{broken}", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                StoreWindow(path)
    gc.collect()
    assert files_and_maps(path) == (0, 0)


def read_by(window: StoreWindow, monkeypatch: pytest.MonkeyPatch, announce: Any) -> set[int]:
    """The pages that are announced."""
    pages: set[int] = set()

    def fadvise(file: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert 0 < size <= 1 << 19
        assert os.fstat(file).st_ino == window.path.stat().st_ino
        pages.update(range(start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    announce()
    return pages


def pages_of(start: int, size: int) -> set[int]:
    return set(range(start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE + 1))


def test_the_pages_of_blocks_and_samples_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lmdb(map(numbered, range(1000)), tmp_path / "a.lmdb", block_bytes=1 << 20)
    window = StoreWindow(path)
    assert window.index.blocks == 4
    for block in range(4):
        blocks = np.array([block])
        found = read_by(window, monkeypatch, lambda blocks=blocks: window.announce(blocks))
        assert found == pages_of(int(window._starts[block]), int(window._sizes[block]))
    samples = np.array([999, 3, 500])
    found = read_by(window, monkeypatch, lambda: window.announce_samples(samples))
    assert found == set().union(*(pages_of(int(place), 4008) for place in window.places(samples)))


def test_announcing_varied_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = StoreWindow(write_lmdb(varied_samples(40), tmp_path / "a.lmdb", block_bytes=4096))
    samples = np.arange(40)
    found = read_by(window, monkeypatch, lambda: window.announce_samples(samples))
    sizes = [window.index.size(window.index.shapes(i)) for i in range(40)]
    assert found == set().union(*(pages_of(int(p), s) for p, s in zip(window.places(samples), sizes, strict=True)))


def test_advice_that_is_refused_or_unknown_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = StoreWindow(path)

    def refuse(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    window.announce(np.arange(3))
    monkeypatch.delattr(os, "posix_fadvise")
    window.announce(np.arange(window.index.blocks))  # by madvise
    window.announce(np.arange(0))
    assert gathered(window, [9]) == [[9] * 500]


def test_a_cold_file_comes_into_memory(tmp_path: Path) -> None:
    """The pages are there soon after they were announced, though nothing has read them."""
    path = write_lmdb(map(numbered, range(2000)), tmp_path / "a.lmdb", block_bytes=1 << 20)
    window = StoreWindow(path)
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-len(window.bytes) // mmap.PAGESIZE)

    def resident() -> int:
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(window.bytes.ctypes.data)
        assert libc.mincore(address, ctypes.c_size_t(len(window.bytes)), flags) == 0
        return sum(flag & 1 for flag in flags)

    os.posix_fadvise(window._file, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident() > pages // 2:
        pytest.skip("this file system keeps files in memory")
    window.announce(np.arange(window.index.blocks))
    for _ in range(600):
        if resident() > 0.98 * pages:
            break
        time.sleep(0.05)
    assert resident() > 0.98 * pages
