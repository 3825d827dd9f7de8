"""The workers of a loader together with the ring they write into, and which batch lies in which slot."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from lightning_speedkit.data.loading.batch_builder import BatchBuilder, BatchTask
from lightning_speedkit.data.loading.batch_layout import restore, walk
from lightning_speedkit.data.loading.process_workers import ProcessWorkers
from lightning_speedkit.data.loading.read_ahead import ReadAhead
from lightning_speedkit.data.loading.ring import ALIGNMENT, Ring, SharedMemory
from lightning_speedkit.data.loading.thread_workers import InlineWorker, ThreadWorkers
from lightning_speedkit.data.loading.worker_choice import WorkerChoice
from lightning_speedkit.errors import LoaderError
from lightning_speedkit.measure.samples import tensors_in

__all__ = ["Crew", "Pending"]

_HELD = 3  # batches in the hands of the training loop: the one computed, the one before it, the one on its way
_OPEN_END = (1 << 30, 1 << 27, 1 << 24)  # reserved for a slot whose size nobody knows; what is not touched is free


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that is being made: its number, and the slot it is made in."""

    number: int
    slot: int | None


class Crew:
    """Makes batches in the slots of a ring and hands them out.

    ``choice`` says who makes them, ``batch_size`` how large they are at most, ``steps`` how many there are in an epoch.
    ``places`` is whether a batch whose size is not known beforehand is worth a slot: not if ``collate`` makes its own
    memory and it need not be page-locked.
    """

    def __init__(
        self,
        builder: BatchBuilder,
        choice: WorkerChoice,
        *,
        batch_size: int,
        steps: int,
        prefetch_factor: int,
        pin_memory: bool,
        places: bool,
        start_method: str | None,
        ahead: ReadAhead | None,
    ) -> None:
        self.process = os.getpid()
        self.iteration: object | None = None  # whose batches are being made
        self.transform: Any = None  # what the workers have got as the transform of a store, for who wants to know
        self.choice = choice
        wanted = 1 if choice.kind == "inline" else max(prefetch_factor * choice.workers, 2)
        self.depth = max(min(wanted, steps), 1)
        self._pin = pin_memory
        self._places = places
        self._ahead = ahead
        self._ring: Ring | None = None
        self._spare = InlineWorker(builder, None)  # for when somebody has taken all slots
        size = builder.slot_bytes(batch_size)
        self._workers: InlineWorker | ThreadWorkers | ProcessWorkers
        if choice.kind == "processes":
            slot_bytes, shared = _shared(self.depth + _HELD, size, 8 * batch_size)
            self._ring = Ring(self.depth + _HELD, slot_bytes, shared=shared)
            if size is not None:
                self._ring.touch()
            self._workers = ProcessWorkers(builder, self._ring, shared, choice.workers, start_method)
            return
        inline = choice.kind == "inline"
        self._workers = InlineWorker(builder, None) if inline else ThreadWorkers(builder, None, choice.workers)
        if size is not None:
            self._make_ring(size)

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return self._workers.pids if isinstance(self._workers, ProcessWorkers) else []

    def announce(self, epoch: int, task: BatchTask, position: int) -> None:
        """A batch that is made soon, which ends at that position of the global order."""
        if self._ahead is not None:
            self._ahead.batch(epoch, task.samples, position)

    def submit(self, task: BatchTask) -> Pending:
        """Have a batch made."""
        slot = None if self._ring is None else self._ring.take()
        if self._on_the_side(slot):
            self._spare.submit(task, None)
        elif isinstance(self._workers, ProcessWorkers):
            assert slot is not None
            self._workers.submit(task, slot)
        else:
            self._workers.submit(task, slot)
        return Pending(task.number, slot)

    def result(self, pending: Pending) -> Any:
        """The batch, over the memory of its slot; copied out if no other slot is left."""
        slot = pending.slot
        try:
            tree, wanted = (self._spare if self._on_the_side(slot) else self._workers).result(pending.number)
        except BaseException:
            if slot is not None and self._ring is not None:
                self._ring.give_back(slot)
            raise
        if slot is None or self._ring is None:
            if self._ring is None and self._places:
                size = max(wanted, _bytes_of(tree))
                self._make_ring(2 * size, size)  # others may be larger
            return tree
        if self._pin and isinstance(self._workers, ProcessWorkers):
            self._ring.page_lock(min(2 * wanted, self._ring.slot_bytes))
            self._pin = False
        batch = restore(tree, self._ring.memory(slot), self._ring.lend(slot))
        return batch if self._ring.free else _copied(batch)

    def drain(self, pending: deque[Pending]) -> None:
        """Wait for what is being made, and take its slots back."""
        self._workers.drain()
        self._spare.drain()
        for each in pending:
            if each.slot is not None and self._ring is not None:
                self._ring.give_back(each.slot)
        pending.clear()

    def close(self) -> None:
        """End the workers."""
        if self.process != os.getpid():
            return
        self._workers.close()
        if self._ahead is not None:
            self._ahead.close()

    def _on_the_side(self, slot: int | None) -> bool:
        return slot is None and isinstance(self._workers, ProcessWorkers)

    def _make_ring(self, slot_bytes: int, touched: int | None = None) -> None:
        assert not isinstance(self._workers, ProcessWorkers)
        self._ring = Ring(self.depth + _HELD, slot_bytes, pinned=self._pin)
        self._ring.touch(touched)
        self._workers.ring = self._ring


def _shared(slots: int, size: int | None, more: int) -> tuple[int, SharedMemory]:
    """Shared memory for so many slots, and the bytes of a slot: ``size`` and ``more``, or as many as there may be."""
    sizes = _OPEN_END if size is None else (size,)
    for slot_bytes in (each + more for each in sizes):
        try:
            return slot_bytes, SharedMemory(Ring.shared_bytes(slots, slot_bytes))
        except OSError as error:  # a limit of the process on address space or file size
            failed = error
    raise LoaderError(
        f"The {slots} buffers of {sizes[-1] / 2**20:.0f} MiB that the worker processes share cannot be had: {failed}. "
        f"Raise the limit of this process (ulimit -v, ulimit -f), or take fewer workers, or workers='threads'."
    ) from failed


def _bytes_of(batch: Any) -> int:
    """The memory that the tensors of a batch need in a slot."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors_in(batch))


def _copied(batch: Any) -> Any:
    return walk(batch, torch.Tensor, torch.Tensor.clone)
