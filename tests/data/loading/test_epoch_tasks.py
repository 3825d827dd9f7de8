"""What is left of an epoch: its tasks, and the batches that are made ahead of the loop that asks."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from lightning_speedkit.data.loading.batch_task import BatchTask
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.epoch_tasks import BatchesAhead, EpochTasks


class Crew:
    """Writes down what it is asked for; a batch is the numbers of its samples."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.iteration: object | None = None
        self.announced: list[tuple[int, list[int], int]] = []
        self.submitted: list[list[int]] = []
        self.given: list[list[int]] = []
        self.drained = 0

    def announce(self, epoch: int, task: BatchTask, position: int) -> None:
        self.announced.append((epoch, task.samples.tolist(), position))

    def submit(self, task: BatchTask) -> list[int]:
        self.submitted.append(task.samples.tolist())
        return self.submitted[-1]

    def result(self, pending: list[int]) -> list[int]:
        self.given.append(pending)
        return pending

    def drain(self, pending: deque[Any]) -> None:
        self.drained += len(pending)
        pending.clear()


def tasks(start: int = 0, before: int = 0, **order: Any) -> EpochTasks:
    return EpochTasks(EpochOrder(**{"samples": 20, "batch_size": 3, "seed": 5, **order}), 4, start, before)


def ahead_of(crew: Crew, some: EpochTasks) -> BatchesAhead:
    return BatchesAhead(crew, some)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0, 6, 20])
def test_tasks_are_those_of_the_order_from_a_position_on(start: int) -> None:
    some = tasks(start, before=start // 3, shuffle="full")
    whole = tasks(shuffle="full")
    rest = [whole.task(step).samples.tolist() for step in range(-(-start // 3), whole.steps)]
    assert [some.task(step).samples.tolist() for step in range(some.steps)] == rest
    assert [some.task(step).key for step in range(some.steps)] == [
        whole.task(step).key for step in range(whole.steps - some.steps, whole.steps)
    ]
    assert [some.end(step) for step in range(some.steps)] == [*range(start + 3, 20, 3), 20][: some.steps]


def test_the_random_numbers_of_ranks_and_epochs_differ() -> None:
    keys = {
        EpochTasks(EpochOrder(samples=20, batch_size=3, rank=rank, world_size=2), epoch, 0, 0).task(step).key
        for rank in range(2)
        for epoch in range(3)
        for step in range(3)
    }
    assert len(keys) == 18


@pytest.mark.parametrize("depth", [1, 3, 50])
def test_every_batch_comes_once_and_no_more_are_being_made_than_the_crew_is_deep(depth: int) -> None:
    crew, some = Crew(depth), tasks(shuffle="full")
    ahead = ahead_of(crew, some)
    assert crew.iteration is not None
    for step in range(some.steps):
        assert ahead.next() == some.task(step).samples.tolist()
        assert len(crew.submitted) - len(crew.given) <= depth
        assert (crew.iteration is None) == (step == some.steps - 1)
    assert crew.submitted == crew.given
    assert [told[1] for told in crew.announced] == crew.submitted
    assert {told[0] for told in crew.announced} == {4}
    assert crew.announced[-1][2] == 20


def test_batches_are_announced_before_they_are_made() -> None:
    crew = Crew(depth=1)
    ahead_of(crew, tasks()).next()
    assert len(crew.submitted) == 1
    assert len(crew.announced) == 5


def test_what_is_dropped_is_waited_for_once_and_a_later_iteration_is_left_alone() -> None:
    crew = Crew(depth=3)
    first = ahead_of(crew, tasks())
    first.next()
    first.drop()
    assert (crew.drained, crew.iteration) == (2, None)
    second = ahead_of(crew, tasks())
    second.next()
    first.drop()
    assert crew.drained == 2
    assert crew.iteration is not None
    second.drop()
    assert crew.drained == 4
