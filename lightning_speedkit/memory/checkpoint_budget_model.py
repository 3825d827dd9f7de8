"""What the peak of a step would be with some of its modules recomputed, told from one traced run without.

The stack of the backward is that of the trace. A checkpointed module holds its inputs until its backward is over; what
it made and only its own nodes save is gone from its forward until its backward begins, and there it is all back at
once, beside what the modules before it hold. A storage that others hold too stays. So one trace is enough for every
choice: each storage adds its bytes to some stretch of time that depends on the few modules that have to do with it.

What it costs: a choice is a row of a matrix product, whatever the size of the model's tensors.
Source: the memory model of Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, over measured lifetimes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from lightning_speedkit.memory.checkpoint_budget_live import StorageLife
from lightning_speedkit.memory.checkpoint_budget_trace import Call, Trace

__all__ = ["ModuleProfile", "PeakModel"]

_MOST = 6  # modules that one storage's life may depend on; beyond, it is taken to be held as long as any would hold it
_SLACK = 8  # operations between the end of a save and that of its storage, which the node itself still reads
_ROWS = 1024  # choices that are judged at once


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """What one module has to do with the memory and the time of a step.

    Attributes:
        path: Where it is in the model.
        saved_bytes: What it makes in the forward and keeps for its own backward; given up if it is checkpointed.
        kept_bytes: Its inputs, which it holds if it is checkpointed.
        transient_bytes: What it needs at once while it is computed again, beyond what it saves then.
        seconds: Of its forward: the time to compute it once more.
    """

    path: str
    saved_bytes: int
    kept_bytes: int
    transient_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Span:
    """One call of a candidate, with its backward."""

    candidate: int
    call: Call
    begin: int  # of the backward: when the recomputation happens
    end: int


class PeakModel:
    """Predicts the peak for sets of candidate modules of which none lies inside another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.paths: list[str] = []  # of those that saved something for the backward, in the order of their first calls
        self._spans = self._find_spans()
        self._terms: dict[tuple[frozenset[int], frozenset[int]], NDArray[numpy.float64]] = {}
        self._spikes: list[tuple[int, int, int]] = []  # candidate, time, bytes
        for place, life in enumerate(trace.lives):
            self._add(place, life)
        for span in self._spans:
            self._spikes.append((span.candidate, span.begin, self._transient(span)))

    def named(self, choice: NDArray[numpy.bool_]) -> tuple[str, ...]:
        """The paths that a row of choices means."""
        return tuple(path for path, chosen in zip(self.paths, choice, strict=True) if chosen)

    def profile(self, path: str, seconds: float) -> ModuleProfile:
        """The measured numbers of one candidate, all its calls together."""
        spans = [span for span in self._spans if self.paths[span.candidate] == path]
        saved = sum(
            life.nbytes
            for life in self._trace.lives
            for span in spans
            if _inside(life.made, span.call) and life.packs and all(_inside(p.saved, span.call) for p in life.packs)
        )
        kept = {place for span in spans for place in span.call.inputs}
        return ModuleProfile(
            path,
            saved,
            sum(self._trace.lives[place].nbytes for place in kept),
            max((self._transient(span) for span in spans), default=0),
            seconds,
        )

    def peaks(self, choices: NDArray[numpy.bool_]) -> NDArray[numpy.float64]:
        """The predicted peak bytes of each row of a (choices, candidates) table of what is checkpointed."""
        keys = list(self._terms)
        curves = numpy.stack([numpy.cumsum(self._terms[key]) for key in keys])
        found = []
        for start in range(0, len(choices), _ROWS):
            rows = choices[start : start + _ROWS]
            holds = numpy.stack(
                [rows[:, sorted(on)].all(axis=1) & ~rows[:, sorted(off)].any(axis=1) for on, off in keys], axis=1
            )
            live = holds.astype(numpy.float64) @ curves
            peak = live.max(axis=1)
            for candidate, time, transient in self._spikes:
                chosen = rows[:, candidate]
                peak[chosen] = numpy.maximum(peak[chosen], live[chosen, time] + transient)
            found.append(peak)
        return numpy.concatenate(found)

    def _find_spans(self) -> list[_Span]:
        spans = []
        for call in self._trace.calls:
            packs = [p for life in self._trace.lives for p in life.packs if _inside(p.saved, call)]
            wanted = [p.wanted for p in packs if p.wanted is not None]
            if wanted:
                if call.path not in self.paths:
                    self.paths.append(call.path)
                released = max(p.released or 0 for p in packs)
                spans.append(_Span(self.paths.index(call.path), call, min(wanted), released))
        return spans

    def _transient(self, span: _Span) -> int:
        """The peak of what a call makes in its forward, less what of it is saved."""
        change = numpy.zeros(self._trace.length + 1)
        saved = 0
        for life in self._trace.lives:
            if _inside(life.made, span.call):
                change[life.made] += life.nbytes
                change[_freed(life)] -= life.nbytes
                saved += life.nbytes if any(_inside(p.saved, span.call) for p in life.packs) else 0
        peak = numpy.cumsum(change)[span.call.start : span.call.end + 1].max(initial=0.0)
        return max(0, int(peak) - saved)

    def _add(self, place: int, life: StorageLife) -> None:
        makers = [span for span in self._spans if _inside(life.made, span.call)]
        savers = [span for span in self._spans if any(_inside(p.saved, span.call) for p in life.packs)]
        takers = [
            span
            for span in self._spans
            if span not in makers and (place in span.call.inputs or span in savers) and life.made <= span.call.start
        ]
        concerned = sorted({span.candidate for span in (*makers, *savers, *takers)})
        if len(concerned) > _MOST or life.made >= self._trace.backward:
            self._hold((), (), life, life.made, max([_freed(life), *(span.end for span in takers)]))
            return
        for bits in itertools.product((False, True), repeat=len(concerned)):
            on = [c for c, bit in zip(concerned, bits, strict=True) if bit]
            off = [c for c, bit in zip(concerned, bits, strict=True) if not bit]
            chosen = set(on)
            active = [span for span in savers if span.candidate in chosen]
            for start, stop in self._stretches(life, active, makers, [t for t in takers if t.candidate in chosen]):
                self._hold(on, off, life, start, stop)

    def _stretches(
        self, life: StorageLife, active: list[_Span], makers: list[_Span], takers: list[_Span]
    ) -> list[tuple[int, int]]:
        """When the storage, and its recomputed twin, live; ``active`` and ``takers`` are those checkpointed."""
        outside = [p.released or 0 for p in life.packs if not any(_inside(p.saved, span.call) for span in active)]
        let_go = max([life.read, *(p.released or 0 for p in life.packs)])
        ends = [life.read, *outside, *(span.end for span in takers)]
        if _freed(life) > let_go + _SLACK or len(outside) == len(life.packs):
            ends.append(_freed(life))  # something else than autograd holds it, or all is as in the trace
        stretches = [(life.made, max(ends))]
        for span in makers:
            inside = [p.released or 0 for p in life.packs if _inside(p.saved, span.call)]
            if span in active and inside:
                stretches.append((max(span.begin, max(ends)), max(inside)))
        return stretches

    def _hold(self, on: Sequence[int], off: Sequence[int], life: StorageLife, start: int, stop: int) -> None:
        if stop <= start:
            return
        key = frozenset(on), frozenset(off)
        if key not in self._terms:
            self._terms[key] = numpy.zeros(self._trace.length + 1)
        self._terms[key][start] += life.nbytes
        self._terms[key][min(stop, self._trace.length)] -= life.nbytes


def _inside(time: int, call: Call) -> bool:
    return call.start <= time < call.end


def _freed(life: StorageLife) -> int:
    return life.made if life.freed is None else life.freed
