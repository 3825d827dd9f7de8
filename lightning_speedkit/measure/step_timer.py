"""Adds up the time of training steps from the marks that a training loop makes. Knows no Lightning and no device.

One step, as the loop reports it, and what becomes of it::

    fetch_started  fetch_stopped  batch_ready  compute_started  compute_stopped  step_done  (next) fetch_started
    |------------- data ----------------------|                |--- compute ---|
    |------------------------------- wall --------------------------------------------------|

A step followed by a validation or by the end of the epoch ends at ``compute_stopped``. Whatever lies between ``paused``
and ``resumed`` (a checkpoint being saved) belongs to no part. A step without ``step_done`` did not finish and is
dropped.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lightning_speedkit.facts import StepTiming
from lightning_speedkit.measure.clocks import Clock

__all__ = ["StepTimer"]

_MEDIAN_WINDOW = 4096  # steps that a median is taken over; bounds the memory of a long run


@dataclass(slots=True)
class _Step:
    start: Any
    counted: bool
    data_end: Any = None
    compute_start: Any = None
    compute_end: Any = None
    end: Any = None
    samples: int | None = None
    # pairs of marks, the second None until it is made
    fetches_inside: list[list[Any]] = field(default_factory=list)  # while computing
    pauses_inside: list[list[Any]] = field(default_factory=list)  # while computing
    pauses_before: list[list[Any]] = field(default_factory=list)
    pauses_after: list[list[Any]] = field(default_factory=list)

    @property
    def computing(self) -> bool:
        return self.compute_start is not None and self.compute_end is None

    @property
    def pauses(self) -> list[list[Any]]:
        """The list for a pause that happens now."""
        if self.compute_start is None:
            return self.pauses_before
        return self.pauses_inside if self.compute_end is None else self.pauses_after

    def marks(self) -> list[Any]:
        """Those that belong to this step alone: ``end`` may be the start of the next one."""
        own = [self.start, self.data_end, self.compute_end]
        if self.compute_start is not self.start:
            own.append(self.compute_start)
        for pairs in (self.fetches_inside, self.pauses_inside, self.pauses_before, self.pauses_after):
            own.extend(mark for pair in pairs for mark in pair)
        return [mark for mark in own if mark is not None]


class StepTimer:
    """Sums the steps of a run, leaving out the first ``warmup_steps`` after each :meth:`begin_epoch`.

    >>> from lightning_speedkit.measure.clocks import HostClock
    >>> timer = StepTimer(HostClock(), warmup_steps=0)
    >>> timer.begin_epoch()
    >>> timer.fetch_started(); timer.fetch_stopped(); timer.batch_ready()
    >>> timer.compute_started(); timer.compute_stopped(); timer.step_done(samples=8)
    >>> timer.finish()
    >>> timer.timing().samples
    8
    """

    def __init__(self, clock: Clock, warmup_steps: int) -> None:
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._step_of_epoch = 0
        self._open: _Step | None = None
        self._waiting: deque[_Step] = deque()  # finished, but the device may not have passed their marks
        self._wall: deque[float] = deque(maxlen=_MEDIAN_WINDOW)
        self._data: deque[float] = deque(maxlen=_MEDIAN_WINDOW)
        self._compute: deque[float] = deque(maxlen=_MEDIAN_WINDOW)
        self._steps = self._samples = 0
        self._seconds_wall = self._seconds_data = self._seconds_compute = 0.0
        self.seconds_warmup = 0.0

    def begin_epoch(self) -> None:
        """The next steps are the first of an epoch."""
        self.interrupt()
        self._step_of_epoch = 0

    def fetch_started(self) -> None:
        """The loop asks the loader for a batch."""
        step = self._open
        if step is not None and step.computing:  # training_step(dataloader_iter) fetches by itself
            step.fetches_inside.append([self._clock.mark(), None])
        elif step is None or step.compute_end is not None:  # else it is a second fetch of the same wait
            self._begin()

    def fetch_stopped(self) -> None:
        """The loader gave a batch, or had none left."""
        step = self._open
        if step is None:
            return
        if step.computing:
            if step.fetches_inside and step.fetches_inside[-1][1] is None:
                step.fetches_inside[-1][1] = self._clock.mark()
        elif step.compute_end is None:
            self._set_data_end(step)

    def batch_ready(self) -> None:
        """The batch is on its device."""
        step = self._open
        if step is not None and step.compute_start is None:
            self._set_data_end(step)

    def compute_started(self) -> None:
        """Forward begins."""
        step = self._open
        if step is None or step.compute_start is not None:  # no fetch came before: the step starts here
            step = self._begin()
            step.compute_start = step.start
        else:
            step.compute_start = self._clock.mark()

    def compute_stopped(self) -> None:
        """The optimizer step, or the backward of a step that only accumulates, is done."""
        if self._open is not None and self._open.computing:
            self._open.compute_end = self._clock.mark()

    def step_done(self, samples: int) -> None:
        """The step finished without an exception and trained on that many samples."""
        if self._open is not None and self._open.compute_end is not None:
            self._open.samples = samples
        self._resolve()

    def paused(self) -> None:
        """Something begins that is no part of a step."""
        if self._open is not None:
            self._open.pauses.append([self._clock.mark(), None])

    def resumed(self) -> None:
        """And ends."""
        pauses = self._open.pauses if self._open is not None else []
        if pauses and pauses[-1][1] is None:
            pauses[-1][1] = self._clock.mark()

    def interrupt(self) -> None:
        """What follows is not the next step: validation, or the end of the epoch."""
        self._close(None)

    def finish(self) -> None:
        """The run is over: take in every finished step."""
        self.interrupt()
        self._clock.wait()
        self._resolve()

    def drop_unfinished(self) -> None:
        """Forget the steps whose marks the device has not passed; it never will."""
        self._waiting.clear()

    def timing(self) -> StepTiming:
        """What was counted so far."""
        self._resolve()
        return StepTiming(
            steps=self._steps,
            samples=self._samples,
            seconds_wall=self._seconds_wall,
            seconds_data=self._seconds_data,
            seconds_compute=self._seconds_compute,
            median_seconds_per_step=_median(self._wall),
            median_seconds_data=_median(self._data),
            median_seconds_compute=_median(self._compute),
        )

    def _begin(self) -> _Step:
        mark = self._clock.mark()
        self._close(mark)
        self._open = _Step(start=mark, counted=self._step_of_epoch >= self._warmup_steps)
        return self._open

    def _set_data_end(self, step: _Step) -> None:
        if step.data_end is not None:
            self._clock.release(step.data_end)
        step.data_end = self._clock.mark()

    def _close(self, end: Any) -> None:
        step, self._open = self._open, None
        if step is None or step.samples is None:
            return  # its marks are not released: its start may be the end of a step that still waits
        step.end = step.compute_end if end is None else end
        self._step_of_epoch += 1
        self._waiting.append(step)

    def _resolve(self) -> None:
        while self._waiting and self._clock.passed(self._waiting[0].end):
            self._add(self._waiting.popleft())

    def _add(self, step: _Step) -> None:
        inside, paused_inside = self._sum(step.fetches_inside), self._sum(step.pauses_inside)
        paused = paused_inside + self._sum(step.pauses_before)
        if step.end is not step.compute_end:
            paused += self._sum(step.pauses_after)
        wall = self._clock.seconds(step.start, step.end) - paused
        data = inside + (self._clock.seconds(step.start, step.data_end) if step.data_end is not None else 0.0)
        compute = self._clock.seconds(step.compute_start, step.compute_end) - inside - paused_inside
        for mark in step.marks():
            self._clock.release(mark)
        if not step.counted:
            self.seconds_warmup += wall
            return
        self._steps += 1
        self._samples += step.samples or 0
        self._seconds_wall += wall
        self._seconds_data += data
        self._seconds_compute += compute
        self._wall.append(wall)
        self._data.append(data)
        self._compute.append(compute)

    def _sum(self, pairs: list[list[Any]]) -> float:
        return sum(self._clock.seconds(start, end) for start, end in pairs if end is not None)


def _median(values: deque[float]) -> float:
    return statistics.median(values) if values else 0.0
