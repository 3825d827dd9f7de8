"""The clocks: the host's goes forward; the CUDA one asks events, reuses them, and waits only when told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_speedkit.measure.clocks import CudaClock, HostClock, clock_for


class Event:
    """Stands in for torch.cuda.Event, whose elapsed_time is in milliseconds."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self.time, self.done = 0.0, False

    def record(self, stream: Any) -> None:
        stream.recorded.append(self)
        self.time, self.done = float(len(stream.recorded) * 250), False

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Event) -> float:
        return other.time - self.time


class Stream:
    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


def test_cuda_marks_are_pooled_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    Event.made = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    clock = clock_for(torch.device("cuda", 0))
    assert isinstance(clock, CudaClock)
    first, second = clock.mark(), clock.mark()
    assert not clock.passed(second)
    second.done = True
    assert clock.passed(second)
    assert clock.seconds(first, second) == 0.25
    clock.release(first)
    assert clock.mark() is first
    assert Event.made == 2
    assert stream.synchronized == 0
    clock.wait()
    assert stream.synchronized == 1


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "meta"])
def test_other_devices_use_the_hosts_clock(kind: str) -> None:
    clock = clock_for(torch.device(kind))
    assert isinstance(clock, HostClock)
    first = clock.mark()
    second = clock.mark()
    assert clock.passed(second)
    assert clock.seconds(first, second) >= 0.0
