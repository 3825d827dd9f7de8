"""Threads that make batches: for work that releases the GIL, such as copying from a map or decoding pictures.

Nothing travels: a batch is made where it is used, in page-locked memory too. Python code in a transform gains nothing,
and takes turns with the training loop.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import Any

import torch

from lightning_speedkit.data.loading.batch_builder import BatchBuilder, BatchTask
from lightning_speedkit.data.loading.ring import Ring
from lightning_speedkit.errors import LoaderError

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
    """A few threads, each of which makes whole batches.

    They are plain threads with two queues: a future for each batch costs as much as the copy of a small one.
    """

    def __init__(self, builder: BatchBuilder, ring: Ring | None, workers: int) -> None:
        self.ring = ring
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._under_way = 0
        started = threading.Barrier(workers + 1)
        arguments = (self._tasks, self._done, builder, started)
        self._threads = [
            threading.Thread(target=_work, args=arguments, name=f"speedkit-loader-{i}", daemon=True)
            for i in range(workers)
        ]
        # At exit too: a daemon thread that is still at work when Python ends takes the process with it.
        self._close = weakref.finalize(self, _end, self._tasks, self._threads)
        before = torch.get_num_threads()
        try:
            for thread in self._threads:
                thread.start()
            started.wait()
        except BaseException:  # interrupted: a thread that waits for the others would be waited for at exit
            started.abort()
            self._close()
            raise
        finally:
            if _counts_threads():
                torch.set_num_threads(before)  # what new threads begin with; see _work

    def submit(self, task: BatchTask, slot: int | None) -> None:
        """Hand a task to the next free thread."""
        self._under_way += 1
        self._tasks.put((task, None if slot is None or self.ring is None else self.ring.memory(slot)))

    def result(self, number: int) -> tuple[Any, int]:
        """Wait for a batch; raises what its thread raised."""
        while number not in self._results:
            if not self._close.alive:
                raise LoaderError("The workers were closed while one of their batches was waited for.")
            self._take()
        tree, error = self._results.pop(number)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        made: tuple[Any, int] = tree
        return made

    def drain(self) -> None:
        """Wait until nobody writes into a slot any more."""
        while True:
            try:
                self._tasks.get_nowait()
            except queue.Empty:
                break
            self._under_way -= 1
        while self._under_way:
            self._take()
        self._results.clear()

    def close(self) -> None:
        """End the threads."""
        self.drain()
        self._close()

    def _take(self) -> None:
        number, tree, error = self._done.get()
        self._under_way -= 1
        self._results[number] = tree, error


def _work(tasks: Any, done: Any, builder: BatchBuilder, started: threading.Barrier) -> None:
    """A thread's life.

    One core each: without that a thread would start threads of its own for one copy, as many as torch has for the
    model. torch's number of threads is one per OpenMP thread, and the last one set is also what new threads begin with;
    so whoever starts this thread sets its own again.
    """
    if _counts_threads():
        torch.get_num_threads()  # the first use in a thread sets its number, also if it was set before
        torch.set_num_threads(1)
    try:
        started.wait()
    except threading.BrokenBarrierError:
        return
    while (item := tasks.get()) is not None:
        task, memory = item
        try:
            answer: Any = task.number, builder.build(task, memory, "untouched"), None
        except BaseException as error:
            answer = task.number, None, error
        done.put(answer)
        del item, task, memory, answer  # nothing of a batch is kept while the thread waits


def _counts_threads() -> bool:
    return "OpenMP" in torch.__config__.parallel_info()


def _end(tasks: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    while not tasks.empty():
        with contextlib.suppress(queue.Empty):
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        # The collector runs anywhere, and an interrupted start leaves threads that were never started.
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()
