"""Tells the kernel which parts of a store come next, from a thread of its own.

When it helps: a file that is not in memory yet. A page fault in a memory map waits for its own page; announced ahead,
many reads are under way at once. When all blocks have been announced and the store fits into memory, nothing is done
any more. Measured with 600 KB samples in random order from a cold file, announced by ``madvise``: 921 MB/s four batches
ahead, 27 to 35 MB/s with the usual ``readahead=False``.

What it costs: while the file is cold, one thread that waits in system calls.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_speedkit.data.loading.epoch_order import EpochOrder, Integers
from lightning_speedkit.data.loading.store_window import StoreWindow

__all__ = ["ReadAhead"]


class ReadAhead:
    """Announces what the coming batches need.

    ``fits`` says whether the store stays in memory once it was read: then each block is announced once. Otherwise
    ``"blocks"`` announces one window of blocks ahead in each epoch, and any other order a block the first time (its
    checksum is compared) and the samples alone from then on.
    """

    def __init__(self, window: StoreWindow, order: EpochOrder, *, fits: bool) -> None:
        self._window = window
        self._order = order
        self._fits = fits
        self._epoch = -1
        self._position = 0
        self._block = 0
        self._new = np.ones(window.index.blocks, dtype=bool)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def batch(self, epoch: int, samples: Integers, position: int) -> None:
        """A batch that is made soon, of these samples, which ends at that position of the global order."""
        window = self._window
        if self._order.shuffle == "blocks" and not self._fits:
            self._advance(epoch, position)
            return
        if self._fits and not self._new.any():
            return
        blocks = window.index.places(samples)[0]
        known = samples[~self._new[blocks]]
        new = np.unique(blocks[self._new[blocks]])
        self._new[new] = False
        if len(new):
            self._do(lambda: window.announce(new))
        if len(known) and not self._fits:
            self._do(lambda: window.announce_samples(known))

    def close(self) -> None:
        """End the thread; what it was still to announce is dropped."""
        if self._stop is not None:
            self._stop()
            self._queue = self._stop = None

    def _advance(self, epoch: int, position: int) -> None:
        window, blocks = self._window, self._order.blocks_of(epoch)
        if epoch != self._epoch or position < self._position:
            begin = max(position - self._order.step_size, 0)  # not the first sample after a resume
            self._block = self._order.window_at(epoch, begin)[0]
        self._epoch, self._position = epoch, position
        target = min(self._order.window_at(epoch, position)[1] + self._order.window_blocks, len(blocks))
        if target > self._block:
            new, self._block = blocks[self._block : target], target
            self._do(lambda: window.announce(new))

    def _do(self, work: Callable[[], None]) -> None:
        if self._queue is None:
            self._queue, stopped = queue.SimpleQueue(), threading.Event()
            thread = threading.Thread(target=_run, args=(self._queue, stopped), name="speedkit-read-ahead", daemon=True)
            thread.start()
            # At exit too: a daemon thread that is still at work when Python ends takes the process with it.
            self._stop = weakref.finalize(self, _end, self._queue, stopped, thread)
        self._queue.put(work)


def _run(work: queue.SimpleQueue[Any], stopped: threading.Event) -> None:
    while (item := work.get()) is not None:
        if not stopped.is_set():
            item()
        del item


def _end(work: queue.SimpleQueue[Any], stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    work.put(None)
    if thread is not threading.current_thread():  # the collector runs anywhere
        thread.join()
