"""What is left of an epoch as tasks, and their batches, made ahead by a crew."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_speedkit.data.loading.batch_task import BatchTask
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.loader_crew import Crew, Pending

__all__ = ["BatchesAhead", "EpochTasks"]

_AHEAD = 4  # batches announced to the kernel before their turn to be made


@dataclass(frozen=True, slots=True)
class EpochTasks:
    """The tasks of an epoch from ``start`` on, a position of the global order, after ``before`` batches of this rank.

    >>> tasks = EpochTasks(EpochOrder(samples=10, batch_size=4, seed=3), epoch=2, start=4, before=1)
    >>> [(task.samples.tolist(), task.key) for task in map(tasks.task, range(tasks.steps))]
    [([4, 5, 6, 7], (3, 2, 0, 1)), ([8, 9], (3, 2, 0, 2))]
    """

    order: EpochOrder
    epoch: int
    start: int
    before: int

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.order.steps(self.start)

    def task(self, step: int) -> BatchTask:
        """The task of that number; its random numbers depend on its place in the epoch alone."""
        order = self.order
        key = (order.seed, self.epoch, order.rank, self.before + step)
        return BatchTask(step, order.batch(self.epoch, step, self.start), key)

    def end(self, step: int) -> int:
        """Where it ends in the global order."""
        return self.order.span(step, self.start)[1]


class BatchesAhead:
    """The batches of the tasks, one after the other; as many as the crew is deep are being made meanwhile.

    They are the crew's ``iteration`` until the last one is out.
    """

    def __init__(self, crew: Crew, tasks: EpochTasks) -> None:
        self._crew = crew
        self._tasks = tasks
        self._steps = tasks.steps
        self._coming: deque[BatchTask] = deque()  # announced to the kernel
        self._pending: deque[Pending] = deque()  # being made
        self._known = self._submitted = 0
        self._iteration = crew.iteration = object()

    def next(self) -> Any:
        """The next batch."""
        crew, tasks = self._crew, self._tasks
        while self._submitted < self._steps and len(self._pending) < crew.depth:
            while self._known < min(self._steps, self._submitted + 1 + _AHEAD):
                self._coming.append(tasks.task(self._known))
                crew.announce(tasks.epoch, self._coming[-1], tasks.end(self._known))
                self._known += 1
            self._pending.append(crew.submit(self._coming.popleft()))
            self._submitted += 1
        batch = crew.result(self._pending.popleft())
        if not self._pending and self._submitted == self._steps and crew.iteration is self._iteration:
            crew.iteration = None  # a loop that counts its batches does not come back for the end
        return batch

    def drop(self) -> None:
        """Wait for those that are being made, and free their memory."""
        if self._crew.iteration is self._iteration:
            self._crew.drain(self._pending)
            self._crew.iteration = None
