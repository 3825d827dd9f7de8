"""Tells the kernel which parts of a store come next, from a thread of its own.

When it helps: a file that is not in memory yet. A page fault in a memory map waits for its own page; announced ahead,
many reads are under way at once. When all blocks have been announced and the store fits into memory, nothing is done
any more. Measured with 600 KB samples in random order from a cold file: 921 MB/s announced four batches ahead, 27 to
35 MB/s with the usual ``readahead=False``.

What it costs: while the file is cold, one thread that waits in system calls.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_speedkit.data.epoch_order import EpochOrder, Integers
from lightning_speedkit.data.store_window import StoreWindow

__all__ = ["ReadAhead"]


class ReadAhead:
    """Announces what the coming batches need.

    ``fits`` says whether the store stays in memory once it was read: then each block is announced once. Otherwise
    ``"blocks"`` announces one window of blocks ahead in each epoch, and any other order the samples themselves.
    """

    def __init__(self, window: StoreWindow, order: EpochOrder, *, fits: bool) -> None:
        self._window = window
        self._order = order
        self._fits = fits
        self._epoch = -1
        self._block = 0
        self._left = window.index.blocks
        self._queue: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def batch(self, epoch: int, samples: Integers, position: int) -> None:
        """A batch that is made soon, of these samples, which ends at that position of the global order."""
        window = self._window
        if self._order.shuffle == "blocks" and not self._fits:
            self._advance(epoch, position)
        elif self._fits:
            if self._left:
                blocks = np.unique(window.index.places(samples)[0])
                new = blocks[~window.announced(blocks)]
                self._left -= len(new)
                if len(new):
                    self._do(lambda: window.announce(new))
        else:
            self._do(lambda: window.announce_samples(samples))

    def close(self) -> None:
        """End the thread."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def _advance(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._block = epoch, 0
            self._do(self._window.forget_announcements)
        blocks = self._order.blocks_of(epoch)
        target = min(self._order.block_position(epoch, position) + self._order.window_blocks, len(blocks))
        if target > self._block:
            new, self._block = blocks[self._block : target], target
            self._do(lambda: self._window.announce(new))

    def _do(self, work: Callable[[], None]) -> None:
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._queue,), name="speedkit-read-ahead", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(work)


def _run(work: queue.SimpleQueue[Any]) -> None:
    while (item := work.get()) is not None:
        item()
