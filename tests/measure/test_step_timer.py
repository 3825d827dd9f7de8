"""Sums of the step timer, worked out by hand on a clock that only moves when told to."""

from __future__ import annotations

from typing import Any

from lightning_speedkit.measure.step_timer import StepTimer


class HandClock:
    """Moves by hand. With ``lag`` the device has passed a mark only so much later, as a GPU does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device_done = float("inf")
        self.released: list[Any] = []
        self.waits = 0

    def mark(self) -> list[float]:
        return [self.now]  # a fresh object, as an event is

    def passed(self, mark: list[float]) -> bool:
        return mark[0] <= self.device_done

    def seconds(self, start: list[float], end: list[float]) -> float:
        assert not any(mark is gone for gone in self.released for mark in (start, end)), "a released mark is read"
        return end[0] - start[0]

    def release(self, mark: list[float]) -> None:
        assert not any(mark is gone for gone in self.released), "released twice"
        self.released.append(mark)

    def wait(self) -> None:
        self.waits += 1
        self.device_done = float("inf")


def step(
    timer: StepTimer, clock: HandClock, *, fetch: float, move: float = 0.0, compute: float, after: float = 0.0
) -> None:
    timer.fetch_started()
    clock.now += fetch
    timer.fetch_stopped()
    clock.now += move
    timer.batch_ready()
    timer.compute_started()
    clock.now += compute
    timer.compute_stopped()
    timer.step_done(samples=4)
    clock.now += after


def new(warmup_steps: int = 0) -> tuple[StepTimer, HandClock]:
    clock = HandClock()
    timer = StepTimer(clock, warmup_steps)
    timer.begin_epoch()
    return timer, clock


def test_sums_and_medians() -> None:
    timer, clock = new()
    step(timer, clock, fetch=1, move=2, compute=4, after=8)
    step(timer, clock, fetch=16, move=0, compute=32, after=64)
    step(timer, clock, fetch=1, move=0, compute=1, after=128)
    timer.finish()
    timing = timer.timing()
    assert (timing.steps, timing.samples) == (3, 12)
    assert timing.seconds_data == 1 + 2 + 16 + 1
    assert timing.seconds_compute == 4 + 32 + 1
    assert timing.seconds_wall == (1 + 2 + 4 + 8) + (16 + 32 + 64) + (1 + 1)  # the last one ends with its compute
    assert (timing.median_seconds_data, timing.median_seconds_compute, timing.median_seconds_per_step) == (3, 4, 15)


def test_the_first_steps_of_every_epoch_are_kept_apart() -> None:
    timer, clock = new(warmup_steps=2)
    for _ in range(2):
        for slow in (100.0, 50.0, 1.0, 1.0):
            step(timer, clock, fetch=slow, compute=2)
        clock.now += 1000  # whatever happens between two epochs
        timer.begin_epoch()
    timer.finish()
    assert (timer.timing().steps, timer.timing().seconds_wall, timer.timing().seconds_data) == (4, 12.0, 4.0)
    assert timer.seconds_warmup == 2 * (102 + 52)


def test_validation_is_in_no_part() -> None:
    timer, clock = new()
    step(timer, clock, fetch=1, compute=2, after=500)
    timer.interrupt()
    clock.now += 1000
    step(timer, clock, fetch=1, compute=2)
    timer.finish()
    assert timer.timing().seconds_wall == 6.0


def test_pauses_are_in_no_part_wherever_they_fall() -> None:
    timer, clock = new()

    def pause() -> None:
        timer.paused()
        clock.now += 100
        timer.resumed()

    pause()  # before any step: nothing to take it from
    for _ in range(2):
        timer.fetch_started()
        clock.now += 1
        timer.fetch_stopped()
        timer.batch_ready()
        pause()
        timer.compute_started()
        clock.now += 2
        pause()
        timer.compute_stopped()
        timer.step_done(4)
        clock.now += 4
        pause()
    timer.finish()
    timing = timer.timing()
    assert (timing.seconds_data, timing.seconds_compute) == (2.0, 4.0)
    assert timing.seconds_wall == (1 + 2 + 4) + (1 + 2)


def test_a_step_that_fetches_by_itself() -> None:
    timer, clock = new()
    for _ in range(2):
        timer.compute_started()
        for fetch in (3, 5):
            timer.fetch_started()
            clock.now += fetch
            timer.fetch_stopped()
        clock.now += 16
        timer.compute_stopped()
        timer.step_done(4)
        clock.now += 32
    timer.finish()
    timing = timer.timing()
    assert (timing.seconds_data, timing.seconds_compute, timing.seconds_wall) == (16.0, 32.0, 24 + 32 + 24)


def test_two_fetches_before_the_first_step_are_one_wait() -> None:
    timer, clock = new()
    timer.fetch_started()
    clock.now += 1
    timer.fetch_stopped()
    step(timer, clock, fetch=2, compute=4)
    timer.finish()
    assert (timer.timing().seconds_data, timer.timing().seconds_wall, timer.timing().steps) == (3.0, 7.0, 1)


def test_a_step_that_fails_or_is_skipped_is_dropped() -> None:
    timer, clock = new()
    step(timer, clock, fetch=1, compute=2, after=4)
    timer.fetch_started()  # a batch that is skipped
    clock.now += 8
    timer.fetch_stopped()
    timer.batch_ready()
    timer.interrupt()
    timer.fetch_started()  # a step that raises: the loop closes what it opened, and step_done never comes
    clock.now += 8
    timer.fetch_stopped()
    timer.compute_started()
    clock.now += 8
    timer.compute_stopped()
    timer.finish()
    assert (timer.timing().steps, timer.timing().seconds_wall) == (1, 7.0)


def test_validation_batches_leave_the_steps_alone() -> None:
    timer, clock = new()
    step(timer, clock, fetch=1, compute=2)
    timer.interrupt()
    clock.now += 5
    timer.batch_ready()  # the strategy moves a validation batch
    timer.fetch_stopped()
    timer.compute_stopped()
    timer.step_done(4)
    timer.finish()
    assert (timer.timing().steps, timer.timing().seconds_wall) == (1, 3.0)


def test_a_lagging_device_is_asked_and_never_waited_for_before_the_end() -> None:
    timer, clock = new()
    clock.device_done = 6.0  # the device stays behind after two steps of 3
    for _ in range(4):
        step(timer, clock, fetch=1, compute=2)
    assert timer.timing().steps == 2
    assert clock.waits == 0
    timer.finish()
    assert (timer.timing().steps, clock.waits) == (4, 1)
    assert timer.timing().seconds_wall == 12.0


def test_every_mark_of_a_finished_step_goes_back_to_the_pool() -> None:
    timer, clock = new()
    made: list[Any] = []
    mark = clock.mark
    clock.mark = lambda: made.append(mark()) or made[-1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(3):
        step(timer, clock, fetch=1, move=1, compute=2, after=1)
        timer.paused()
        timer.resumed()
    timer.finish()
    assert {id(m) for m in made} == {id(m) for m in clock.released}


def test_what_the_device_never_finished_can_be_dropped() -> None:
    timer, clock = new()
    clock.device_done = 3.0
    for _ in range(3):
        step(timer, clock, fetch=1, compute=2)
    timer.drop_unfinished()
    assert timer.timing().steps == 1
