"""Clocks for a training loop: the host's, and the device's without making the host wait for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Makes marks in time now, and tells later how far apart they were."""

    def mark(self) -> Any:
        """A mark at this moment. Must not make the host wait."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the device has reached the mark, so that it may be measured."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """From one passed mark to another."""
        ...

    def release(self, mark: Any) -> None:
        """The mark will not be asked about again."""
        ...

    def wait(self) -> None:
        """Wait until every mark has passed. Called at the end of a run only."""
        ...


class HostClock:
    """The host's monotonic clock; right where the device works in step with the host, as a CPU does.

    >>> clock = HostClock()
    >>> clock.seconds(clock.mark(), clock.mark()) >= 0.0
    True
    """

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, mark: float) -> None:
        pass

    def wait(self) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream, taken from a pool.

    The host runs ahead of the device, so the host's clock shows when work was queued and not when it was done. Time
    between two events is the device's own: a wait for data that was hidden behind queued work is no wait there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def release(self, mark: torch.cuda.Event) -> None:
        self._pool.append(mark)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock that is right for this device.

    >>> type(clock_for(torch.device("cpu"))).__name__
    'HostClock'
    """
    return CudaClock(device) if device.type == "cuda" else HostClock()
