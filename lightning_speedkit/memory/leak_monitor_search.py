"""Looks for a leak step by step: watches cheap counters, and counts what lives only when one of them keeps rising.

What it does: see :class:`LeakSearch`. When it helps: :class:`LeakMonitor` does it in a Trainer; a loop of one's own
can. What it costs: three readings on the first 128 steps, then on fewer and fewer; at a suspicion four counts of all
objects.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_speedkit.measure.memory_use import read_available_bytes, read_device_memory, read_private_bytes
from lightning_speedkit.memory.leak_monitor_census import Census, grown_between, take_census
from lightning_speedkit.memory.leak_monitor_growth import Samples, steady_slope
from lightning_speedkit.memory.leak_monitor_story import Leak, name_leak

__all__ = ["LeakSearch"]

_WINDOW = 40  # samples before the first suspicion
_ASK = 8  # samples between two looks at them
_GAPS = (24, 24, 72)  # steps between the counts
_BLOCKS_PER_STEP = 0.25  # of Python's allocator
_HOST_NOISE = 4096  # bytes per step by which the memory of a process rises for a while without a leak
_FRAMES = 8  # of each allocation that is traced
_STRIKES = 3  # suspicions in a row before memory that no object accounts for is called a leak
_ENDLESS = 1000  # steps of an epoch without end after which what it gathers is no longer waited for
_HARMLESS = ("graph", "hooks", "cache", "garbage")  # never held back for being small


@dataclass
class _Case:
    """A suspicion: the counts so far, and by how much the counters rose before."""

    slopes: tuple[float, float, float]
    steps: list[int]
    counts: list[Census]
    before: list[tuple[float, float]]  # of the host and of the device
    after: list[tuple[float, float]]  # a count leaves some memory behind
    borders: int


class LeakSearch:
    """Call :meth:`look` after each training step, always at the same place, and :meth:`border` between epochs.

    A counter that rises steadily over at least 40 samples is a suspicion. It is a leak when something is named of
    which each of four counts over the next 120 steps finds more. What was kept within one epoch only is held back
    until the next has begun, as metrics and outputs are gathered and let go; unless memory would not last until then.

    Args:
        roots: Gives the objects from which owners are named.
        device: Where the model is.
        warmup_steps: So many steps are not looked at.
        min_bytes_per_step: Slower growth is no leak.
        trace: Whether a suspicion is followed by ``tracemalloc``.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]],
        device: torch.device,
        warmup_steps: int,
        min_bytes_per_step: float,
        trace: bool,
    ) -> None:
        self._roots, self._device, self._trace = roots, device, trace
        self._min_bytes = min_bytes_per_step
        self._samples = Samples(counters=3)
        self._next, self._wait = warmup_steps, 64
        self._case: _Case | None = None
        self._held: tuple[_Case, Leak] | None = None
        self._again: tuple[Leak, Census, int] | None = None
        self._borders = self._strikes = self._step = 0
        self._known: set[str] = set()
        self._tracing = False

    def wants(self, step: int) -> bool:
        """Whether anything is to be done after this step."""
        return step >= self._next

    def look(self, step: int, left_in_epoch: float) -> Leak | None:
        """After a step; ``left_in_epoch`` is how many follow before :meth:`border`. A leak that was found, or None."""
        self._step = step
        if step < self._next or self._held is not None:
            return None
        if self._again is not None:
            return self._count_again(*self._again)
        if self._case is not None:
            return self._count(self._case, step, left_in_epoch)
        self._samples.add(step, self._read())
        self._next = step + self._samples.stride
        if len(self._samples) >= _WINDOW and len(self._samples) % _ASK == 0:
            slopes = self._slopes()
            if slopes[0] > 0 or slopes[1] > 0 or slopes[2] > 0:
                self._case = _Case(slopes, [], [], [], [], self._borders)
                self._start_trace()
                return self._count(self._case, step, left_in_epoch)
        return None

    def border(self, step: int, last: bool = False) -> Leak | None:
        """Between epochs, after the first step of the new one; or, as the last, when training ends.

        What was held back and is still there has to grow on in the new epoch: a data set that keeps what it has read
        grows in the first one only. At the end it is enough that it is there. A leak that was found, or ``None``.
        """
        self._step = step
        self._borders += 1
        if self._again is not None:
            return self._count_again(*self._again) if last else None
        if self._held is None:
            return None
        (case, leak), self._held = self._held, None
        now = take_census()
        was, became, remains = (_count_of(leak, census) for census in (case.counts[0], case.counts[-1], now))
        self._next = self._step + self._wait
        if leak.kind not in ("garbage", "unnamed") and remains - was < (became - was) / 2:
            return None
        if last or leak.kind == "unnamed":
            return leak
        self._again = leak, now, self._step
        self._next = self._step + _GAPS[0]
        return None

    def _count_again(self, leak: Leak, before: Census, since: int) -> Leak | None:
        self._again = None
        self._next = self._step + self._wait
        now = take_census()
        more = now.garbage if leak.kind == "garbage" else _count_of(leak, now) - _count_of(leak, before)
        return leak if more >= (self._step - since) / 2 else None

    def slopes(self) -> tuple[float, float]:
        """Bytes per step on the host and on the device, as far as the samples tell; 0 for what does not rise."""
        host, device, _ = self._slopes()
        return host, device

    def close(self) -> None:
        """Stop what was started."""
        self._stop_trace()
        self._case = self._held = self._again = None

    def _read(self) -> tuple[float, float, float]:
        memory = read_device_memory(self._device)
        return read_private_bytes() or 0, 0 if memory is None else memory.allocated_bytes, sys.getallocatedblocks()

    def _slopes(self) -> tuple[float, float, float]:
        steps = self._samples.steps
        host, device, blocks = (steady_slope(steps, self._samples.values(counter)) for counter in range(3))
        return (
            host if host >= max(self._min_bytes, _HOST_NOISE) else 0.0,
            device if device >= self._min_bytes else 0.0,
            blocks if blocks >= _BLOCKS_PER_STEP else 0.0,
        )

    def _count(self, case: _Case, step: int, left_in_epoch: float) -> Leak | None:
        case.steps.append(step)
        case.before.append(self._read()[:2])
        case.counts.append(take_census())
        case.after.append(self._read()[:2])
        done = len(case.counts) - 1
        leak = self._verdict(case) if done >= 2 else None
        graph = leak is not None and leak.kind in ("graph", "hooks")
        if done < len(_GAPS) and not graph:
            self._next = step + _GAPS[done] * max(1, self._samples.stride // 4)
            return None
        self._close_case(step)
        if leak is None or leak.identity in self._known:
            return None
        self._known.add(leak.identity)
        if graph or case.borders != self._borders or self._cannot_wait(leak, left_in_epoch, step):
            return leak
        self._held = case, leak
        return None

    def _close_case(self, step: int) -> None:
        self._stop_trace()
        self._case = None
        self._samples.clear()
        self._next = step + self._wait
        self._wait *= 2

    def _verdict(self, case: _Case) -> Leak | None:
        """What all counts of the case agree on; ``None`` also for a cache of the user's that is not full yet."""
        grown = [one for one in grown_between(case.counts, case.steps) if one.kind != "garbage" or not gc.isenabled()]
        if any(one.kind == "filling cache" for one in grown):
            return None
        slopes = [_went_on(case, counter) for counter in range(2)]
        leak = None
        if grown:
            leak = name_leak(grown, self._roots(), slopes, self._device, case.steps, self._known)
        elif any(slopes) and len(case.counts) > len(_GAPS):
            self._strikes += 1
            if self._strikes >= _STRIKES:
                leak = name_leak([], {}, slopes, self._device, case.steps)
            else:
                self._wait = 32  # look again soon
        elif len(case.counts) > len(_GAPS):
            self._strikes = 0
        if leak is None or (leak.kind not in _HARMLESS and leak.bytes_per_step < self._min_bytes):
            return None
        on_host, on_device, _ = case.slopes  # which tell more than the objects that Python sees
        where = str(self._device) if on_device else leak.where
        measured = max(leak.bytes_per_step, on_device or on_host)
        return dataclasses.replace(leak, where=where, bytes_per_step=measured, site=self._site(case))

    def _cannot_wait(self, leak: Leak, left_in_epoch: float, step: int) -> bool:
        if left_in_epoch == float("inf"):
            return step >= _ENDLESS
        free = read_available_bytes(self._device if leak.where != "host" else torch.device("cpu"))
        return free is not None and leak.bytes_per_step * left_in_epoch > free / 2

    def _start_trace(self) -> None:
        if self._trace and not tracemalloc.is_tracing():
            tracemalloc.start(_FRAMES)
            self._tracing = True

    def _stop_trace(self) -> None:
        if self._tracing:
            tracemalloc.stop()
            self._tracing = False

    def _site(self, case: _Case) -> str:
        """Where most of what was allocated during the case and lives was allocated."""
        if not (self._trace and tracemalloc.is_tracing()):
            return ""
        ours = [f"{__file__.removesuffix('search.py')}*", tracemalloc.__file__]  # which is what the counts take
        hidden = [tracemalloc.Filter(False, pattern, all_frames=True) for pattern in ours]
        found = tracemalloc.take_snapshot().filter_traces(hidden).statistics("lineno")
        often = [one for one in found if one.count >= (case.steps[-1] - case.steps[0]) / 2]
        return f"{often[0].traceback[0].filename}:{often[0].traceback[0].lineno}" if often else ""


def _went_on(case: _Case, counter: int) -> float:
    """The slope from before the counts, if at least half of it was seen between each of them and the next."""
    gains = [
        (case.before[number + 1][counter] - case.after[number][counter]) / (case.steps[number + 1] - case.steps[number])
        for number in range(len(case.steps) - 1)
    ]
    slope = case.slopes[counter]
    return slope if min(gains) >= slope / 2 else 0.0


def _count_of(leak: Leak, census: Census) -> float:
    grown = leak.grown
    if grown is None:
        return 0.0
    table: Any = {
        "graph": census.nodes,
        "tensors": census.tensors,
        "container": census.lengths,
        "hooks": census.lengths,
        "objects": census.types,
        "cache": {name: filled for name, (filled, _) in census.caches.items()},
    }.get(grown.kind, {})
    return float(table.get(grown.key, 0))
