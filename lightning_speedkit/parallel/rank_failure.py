"""One rank that fails tells the others why, and none of them waits on for it.

What it does: the rank that raises writes its error to a small store that all ranks read. The others end with that
message, in place of a "connection closed" or a timeout. One that is blocked where no error reaches it (in a collective
of NCCL, or while the rank that failed lives on) writes the message and ends its process.

What it costs: a thread per rank that asks the store four times a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch

from lightning_speedkit.parallel.rank_store import TCPStore, open_store

__all__ = ["FailureRelay", "failure_text"]

_EVERY, _LINGER = 0.25, 3.0  # seconds: between two looks, and for the others to see why rank 0 ends


def failure_text(rank: int, error: BaseException) -> str:
    """What one rank tells the others: the error, and the place where it was raised.

    >>> failure_text(1, ValueError("no data"))
    'Rank 1 failed: ValueError: no data'
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"Rank {rank} failed: {type(error).__name__}: {error}{place}"


class FailureRelay:
    """What ranks know of the failures of others. It is made on all ranks at the same point.

    Args:
        address: The host of rank 0.
        patience: How many seconds this rank may stand still after another one failed.
    """

    def __init__(self, address: str, patience: float = 10.0) -> None:
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._patience, self._main = patience, threading.get_ident()
        self._told: str | None = None
        self._own = False
        self._closed = threading.Event()
        self._store, self._threads_store = open_store(address)
        self._thread = threading.Thread(target=self._watch, name="rank failures", daemon=True)
        self._thread.start()

    def tell(self, error: BaseException) -> str | None:
        """This rank failed. Returns what another one told that failed before, if there is one."""
        self._own = True
        try:
            if self._store.add("failures", 1) == 1:
                message = {"rank": self._rank, "text": failure_text(self._rank, error)}
                self._store.set("first", json.dumps(message))
                if self._rank == 0:
                    self._linger()
                return None
        except RuntimeError:  # rank 0 is gone, with the store
            return self._told
        return self._read(self._store) if self._rank == 0 else self._told or self._read(self._store)

    def close(self) -> None:
        """Stop to look. Rank 0 has the store, so it leaves last, but does not wait long."""
        self._closed.set()
        self._thread.join()
        if self._own or self._told is not None:
            return
        try:
            closed, end = self._store.add("closed", 1), time.monotonic() + _LINGER
            while self._rank == 0 and closed < self._size and time.monotonic() < end:
                time.sleep(0.01)
                closed = self._store.add("closed", 0)
        except RuntimeError:  # rank 0 is gone
            return

    def _linger(self) -> None:
        end = time.monotonic() + _LINGER
        while time.monotonic() < end and self._store.add("seen", 0) < self._size - 1:
            time.sleep(0.05)

    def _read(self, store: TCPStore) -> str | None:
        store.wait(["first"], timedelta(seconds=2))
        message = json.loads(store.get("first"))
        return None if message["rank"] == self._rank else str(message["text"])

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_EVERY):
                if self._threads_store.check(["first"]):
                    self._told = self._read(self._threads_store)
                    if self._told is not None:
                        self._threads_store.add("seen", 1)
                        break
        except RuntimeError:  # rank 0 has closed the store
            return
        self._end_if_blocked()

    def _end_if_blocked(self) -> None:
        if self._told is None:
            return
        place, since = None, time.monotonic()
        while not (self._closed.wait(_EVERY) or self._own):
            now = _place(self._main)
            if now != place:
                place, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience:
                sys.stderr.write(f"{self._told}\nRank {self._rank} waited for it and ends.\n")
                sys.stderr.flush()
                os._exit(1)


def _place(thread: int) -> tuple[int, int, float]:
    """Where a thread is; it stays the same while the thread waits."""
    frame = sys._current_frames().get(thread)
    seconds = 0.0
    if hasattr(time, "pthread_getcpuclockid") and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # who waits for a GPU is busy
        seconds = round(time.clock_gettime(time.pthread_getcpuclockid(thread)), 2)
    return id(frame), frame.f_lasti if frame else -1, seconds
