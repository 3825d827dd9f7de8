"""Threads that make batches: for work that releases the GIL, such as copying from a map or decoding pictures.

Nothing travels: a batch is made where it is used, in page-locked memory too. Python code in a transform gains nothing,
and takes turns with the training loop.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lightning_speedkit.data.batch_builder import BatchBuilder, BatchTask
from lightning_speedkit.data.ring import Ring

__all__ = ["InlineWorker", "ThreadWorkers"]


class InlineWorker:
    """Makes each batch when it is asked for, in the thread that asks."""

    def __init__(self, builder: BatchBuilder, ring: Ring | None) -> None:
        self._builder = builder
        self.ring = ring
        self._tasks: dict[int, tuple[BatchTask, int | None]] = {}

    def submit(self, task: BatchTask, slot: int | None) -> None:
        """Take a task."""
        self._tasks[task.number] = task, slot

    def result(self, number: int) -> tuple[Any, int]:
        """The batch of a task."""
        task, slot = self._tasks.pop(number)
        memory = None if slot is None or self.ring is None else self.ring.memory(slot)
        return self._builder.build(task, memory, "put back")

    def drain(self) -> None:
        """Forget what was not asked for."""
        self._tasks.clear()

    def close(self) -> None:
        """Nothing to end."""


class ThreadWorkers:
    """A few threads, each of which makes whole batches."""

    def __init__(self, builder: BatchBuilder, ring: Ring | None, workers: int) -> None:
        self._builder = builder
        self.ring = ring
        self._futures: dict[int, Future[tuple[Any, int]]] = {}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="speedkit-loader")
        self._one_core_each(workers)

    def submit(self, task: BatchTask, slot: int | None) -> None:
        """Hand a task to the next free thread."""
        memory = None if slot is None or self.ring is None else self.ring.memory(slot)
        self._futures[task.number] = self._pool.submit(self._builder.build, task, memory, "untouched")

    def result(self, number: int) -> tuple[Any, int]:
        """Wait for a batch; raises what its thread raised."""
        return self._futures.pop(number).result()

    def drain(self) -> None:
        """Wait until nobody writes into a slot any more."""
        for future in self._futures.values():
            future.cancel()
        for future in self._futures.values():
            if not future.cancelled():
                future.exception()
        self._futures.clear()

    def close(self) -> None:
        """End the threads."""
        self.drain()
        self._pool.shutdown()

    def _one_core_each(self, workers: int) -> None:
        """Without this each thread would start threads of its own for one copy, as many as torch has for the model.

        torch's number of threads is one per OpenMP thread, and the last one set is also what new threads begin with:
        so the caller's own is set again at the end, which leaves it as it was.
        """
        if "OpenMP" not in torch.__config__.parallel_info():
            return
        before = torch.get_num_threads()
        together = threading.Barrier(workers)

        def start() -> None:
            torch.set_num_threads(1)
            together.wait(60)

        for started in [self._pool.submit(start) for _ in range(workers)]:
            started.result()
        torch.set_num_threads(before)
