"""What is announced to the kernel, and when."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.read_ahead import ReadAhead
from lightning_speedkit.data.loading.store_window import StoreWindow
from tests.data.processes import wait_until

COUNT, PER_BLOCK, BATCH = 60, 2, 3
BLOCKS = COUNT // PER_BLOCK


class Recorded(StoreWindow):
    """A window that remembers what was announced."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blocks: list[int] = []
        self.samples: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()

    def announce(self, blocks: Any) -> None:
        self.go.wait(30)
        self.threads.add(threading.current_thread().name)
        self.blocks += blocks.tolist()
        super().announce(blocks)

    def announce_samples(self, samples: Any) -> None:
        self.go.wait(30)
        self.samples += samples.tolist()
        super().announce_samples(samples)


@pytest.fixture
def window(tmp_path: Path) -> Recorded:
    path = write_lmdb(((torch.full((500,), i), i) for i in range(COUNT)), tmp_path / "a.lmdb", block_bytes=8192)
    found = Recorded(path)
    assert found.index.blocks == BLOCKS
    return found


def order_of(window: StoreWindow, shuffle: str) -> EpochOrder:
    return EpochOrder(
        samples=COUNT, batch_size=BATCH, shuffle=shuffle, block_firsts=window.index.block_firsts(), window_blocks=4
    )


def announced(ahead: ReadAhead, window: Recorded, epoch: int, steps: range, start: int = 0) -> tuple[list[int], Any]:
    """The blocks and samples that these steps announce."""
    window.blocks, window.samples, order = [], [], ahead._order
    for step in steps:
        ahead.batch(epoch, order.batch(epoch, step, start), order.span(step, start)[1])
    if ahead._queue is not None:
        done = threading.Event()
        ahead._queue.put(done.set)
        assert done.wait(30)
    return window.blocks, window.samples


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "speedkit-read-ahead"]


@pytest.mark.parametrize("shuffle", ["none", "full", "blocks"])
def test_a_store_that_fits_is_announced_once(window: Recorded, shuffle: str) -> None:
    ahead = ReadAhead(window, order_of(window, shuffle), fits=True)
    order = ahead._order
    blocks, samples = announced(ahead, window, 0, range(2))
    assert set(blocks) == {i // PER_BLOCK for i in order.at(0, 0, 2 * BATCH).tolist()}
    blocks += announced(ahead, window, 0, range(2, order.steps()))[0]
    assert sorted(blocks) == list(range(BLOCKS))
    assert announced(ahead, window, 1, range(order.steps())) == ([], [])
    assert samples == []
    assert window.threads == {"speedkit-read-ahead"}
    ahead.close()


def test_no_block_is_forgotten_while_the_thread_is_late(window: Recorded) -> None:
    before = set(reading())
    ahead = ReadAhead(window, order_of(window, "full"), fits=True)
    window.go.clear()
    order, done = ahead._order, threading.Event()
    half = order.steps() // 2
    for step in (*range(half), *range(half)):
        ahead.batch(0, order.batch(0, step), 0)
    assert window.blocks == []
    window.go.set()
    for step in range(half, order.steps()):
        ahead.batch(0, order.batch(0, step), 0)
    assert ahead._queue is not None
    ahead._queue.put(done.set)
    assert done.wait(30)
    assert sorted(window.blocks) == list(range(BLOCKS))
    ahead.close()
    assert set(reading()) <= before


@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_a_larger_store_announces_blocks_first_and_then_samples(window: Recorded, shuffle: str) -> None:
    ahead = ReadAhead(window, order_of(window, shuffle), fits=False)
    order = ahead._order
    blocks, samples = announced(ahead, window, 0, range(order.steps()))
    assert sorted(blocks) == list(range(BLOCKS))
    alone = set(range(COUNT)) - set(samples)
    assert len({i // PER_BLOCK for i in alone}) == BLOCKS  # at least one sample of each block came with it
    blocks, samples = announced(ahead, window, 1, range(order.steps()))
    assert blocks == []
    assert samples == order.at(1, 0, COUNT).tolist()
    ahead.close()


def test_blocks_are_announced_one_window_ahead(window: Recorded) -> None:
    ahead = ReadAhead(window, order_of(window, "blocks"), fits=False)
    order = ahead._order
    for epoch in (0, 1):
        expected = order.blocks_of(epoch).tolist()
        told: list[int] = []
        for step in range(order.steps()):
            told += announced(ahead, window, epoch, range(step, step + 1))[0]
            position = order.span(step)[1]
            needed = {int(i) // PER_BLOCK for i in order.at(epoch, 0, position)}
            assert needed <= set(told)
            windows = position // (4 * PER_BLOCK) + 2  # the one that is read, and the next
            assert told == expected[: 4 * windows]
        assert told == expected  # each once
    assert window.samples == []
    ahead.close()


@pytest.mark.parametrize("start", [0, 9, 33, 57])
def test_a_resumed_epoch_announces_what_is_left(window: Recorded, start: int) -> None:
    ahead = ReadAhead(window, order_of(window, "blocks"), fits=False)
    order = ahead._order
    blocks, _ = announced(ahead, window, 3, range(order.steps(start)), start)
    assert blocks == order.blocks_of(3)[start // (4 * PER_BLOCK) * 4 :].tolist()
    again, _ = announced(ahead, window, 3, range(order.steps()))  # the same epoch from its beginning
    assert again == order.blocks_of(3).tolist()
    ahead.close()


def test_the_thread_ends(window: Recorded) -> None:
    before = set(reading())  # of loaders that the collector has yet to take
    ahead = ReadAhead(window, order_of(window, "full"), fits=False)
    assert set(reading()) <= before  # none without work
    announced(ahead, window, 0, range(1))
    assert len(set(reading()) - before) == 1
    ahead.close()
    ahead.close()
    announced(ahead, window, 0, range(1))  # begins anew
    del ahead
    gc.collect()
    assert wait_until(lambda: set(reading()) <= before)


def test_samples_beyond_the_end_of_a_padded_epoch(window: Recorded) -> None:
    for shuffle in ("full", "blocks"):
        order = EpochOrder(
            samples=COUNT, batch_size=7, shuffle=shuffle, world_size=8, rank=7, window_blocks=4,
            block_firsts=window.index.block_firsts(),
        )  # fmt: skip
        for fits in (True, False):
            ahead = ReadAhead(window, order, fits=fits)
            announced(ahead, window, 0, range(order.steps()))
            assert set(np.array(window.blocks)) <= set(range(BLOCKS))
            ahead.close()
