"""Batches made by threads, and by the thread that asks."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading.batch_builder import BatchTask, SampleBatches
from lightning_speedkit.data.loading.batch_layout import restore
from lightning_speedkit.data.loading.ring import Ring
from lightning_speedkit.data.loading.thread_workers import InlineWorker, ThreadWorkers
from lightning_speedkit.errors import LoaderError
from tests.data.child import run_child
from tests.data.forked import output_of_fork
from tests.data.processes import wait_until

KINDS = ["inline", "threads"]


def workers_of(kind: str, builder: Any, ring: Ring | None, count: int = 3) -> Any:
    return InlineWorker(builder, ring) if kind == "inline" else ThreadWorkers(builder, ring, count)


def task(number: int, size: int = 4) -> BatchTask:
    return BatchTask(number, np.arange(number, number + size), (0, 0, 0, number))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("speedkit-loader")]


class Vectors:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(random.Random(index).random() / 1000)
        return torch.full((5,), index)


@pytest.mark.parametrize("slots", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_come_in_the_order_in_which_they_are_asked_for(kind: str, slots: int) -> None:
    ring = Ring(slots, 4096) if slots else None
    workers = workers_of(kind, SampleBatches(Vectors(), None), ring)
    for first in range(0, 60, 6):
        taken = [(number, None if ring is None else ring.take()) for number in range(first, first + 6)]
        for number, slot in taken:
            workers.submit(task(number), slot)
        for number, slot in reversed(taken):
            tree, wanted = workers.result(number)
            batch = tree if ring is None else restore(tree, ring.memory(slot), ring.lend(slot))
            assert batch.tolist() == [[i] * 5 for i in range(number, number + 4)]
            assert wanted == 192
            del batch
        assert ring is None or ring.free == slots
    workers.close()


class Failing:
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("five")
        if index == 6:
            raise KeyboardInterrupt
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_for_its_batch_alone(kind: str) -> None:
    workers = workers_of(kind, SampleBatches(Failing(), None), None)
    for number in (4, 5, 6, 7):
        workers.submit(task(number, 1), None)
    assert workers.result(4)[0].tolist() == [4]
    with pytest.raises(LoaderError, match="Sample 5"):
        workers.result(5)
    with pytest.raises(KeyboardInterrupt):
        workers.result(6)
    assert workers.result(7)[0].tolist() == [7]
    workers.close()


class Slow:
    """Takes its time, and knows how many are at work."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.go = threading.Event()

    def __getitem__(self, index: int) -> int:
        self.begun += 1
        assert self.go.wait(30)
        self.ended += 1
        return index


def test_drain_waits_for_those_at_work_and_drops_the_others() -> None:
    dataset = Slow()
    workers = ThreadWorkers(SampleBatches(dataset, None), None, 2)
    for number in range(8):
        workers.submit(task(number, 1), None)
    while dataset.begun < 2:
        time.sleep(0.001)
    threading.Timer(0.2, dataset.go.set).start()
    workers.drain()
    assert dataset.ended == dataset.begun
    begun = dataset.begun
    workers.drain()
    workers.submit(task(3, 1), None)  # the numbers begin anew
    assert workers.result(3)[0].tolist() == [3]
    assert dataset.begun == begun + 1
    workers.close()
    with pytest.raises(LoaderError, match="closed while"):
        workers.result(7)


def test_inline_batches_are_made_when_they_are_asked_for() -> None:
    dataset = Slow()
    dataset.go.set()
    workers = InlineWorker(SampleBatches(dataset, None), None)
    for number in range(3):
        workers.submit(task(number, 1), None)
    assert dataset.begun == 0
    assert workers.result(1)[0].tolist() == [1]
    assert dataset.begun == 1
    workers.drain()
    with pytest.raises(KeyError):
        workers.result(2)


class Drawing:
    def __getitem__(self, index: int) -> tuple[float, torch.Tensor]:
        return random.random(), torch.rand(3)


def test_inline_batches_do_not_touch_the_random_state() -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    workers = InlineWorker(SampleBatches(Drawing(), None), None)
    found = []
    for number in (1, 2, 1):
        workers.submit(task(number), None)
        found.append(workers.result(number)[0])
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][1], found[1][1])


def numbers_of_threads() -> None:
    """Prints torch's number of threads in the workers, then in the caller and in a new thread, before and after."""

    class Asking:
        def __getitem__(self, index: int) -> int:
            time.sleep(0.05)  # so that each thread gets some
            torch.ones(100_000).add_(1)
            return torch.get_num_threads()

    def in_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    for number in (3, 2, 1):
        torch.set_num_threads(number)
        torch.ones(100_000).add_(1)  # the caller's own pool is there
        before = torch.get_num_threads(), in_new_thread()
        workers = ThreadWorkers(SampleBatches(Asking(), None), None, 4)
        for i in range(8):
            workers.submit(task(i, 1), None)
        inside = {int(workers.result(i)[0]) for i in range(8)}
        after = torch.get_num_threads(), in_new_thread()
        workers.close()
        print(inside, before == after == (number, number), torch.get_num_threads() == number)


def leave_threads_at_work() -> None:
    workers = ThreadWorkers(SampleBatches(Vectors(), None), Ring(8, 4096), 3)
    for number in range(8):
        workers.submit(task(number, 100), number)
    globals()["kept"] = workers
    print("ends")


def count_threads_and_leave() -> None:
    numbers_of_threads()
    leave_threads_at_work()


def test_one_core_for_each_thread_and_an_interpreter_that_ends_while_they_are_at_work() -> None:
    """Torch's setting is as before; in a process of its own, since torch cannot have other threads after a fork."""
    child = run_child(count_threads_and_leave)
    assert (child.returncode, child.stdout, child.stderr) == (0, "{1} True True\n" * 3 + "ends\n", "")


@pytest.mark.parametrize("closed", [True, False])
def test_the_threads_end(closed: bool) -> None:
    before = set(loader_threads())  # of loaders that the collector has yet to take
    workers = ThreadWorkers(SampleBatches(Vectors(), None), None, 3)
    own = set(loader_threads()) - before
    assert len(own) == 3
    for number in range(9):
        workers.submit(task(number), None)
    if closed:
        workers.close()
        workers.close()
    del workers
    gc.collect()
    assert wait_until(lambda: not any(thread.is_alive() for thread in own))


def interrupted_while_they_start() -> None:
    real = threading.Barrier.wait

    def wait(self: threading.Barrier, timeout: float | None = None) -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(self, timeout)

    threading.Barrier.wait = wait  # type: ignore[method-assign]
    before = torch.get_num_threads()
    try:
        ThreadWorkers(SampleBatches(Vectors(), None), None, 2)
    except KeyboardInterrupt:
        print("interrupted", torch.get_num_threads() == before)
    while len(loader_threads()):
        time.sleep(0.01)
    print("ends")


def test_an_interrupt_while_the_threads_start_leaves_none() -> None:
    assert output_of_fork(interrupted_while_they_start) == ("returned", "interrupted True\nends\n", "")
