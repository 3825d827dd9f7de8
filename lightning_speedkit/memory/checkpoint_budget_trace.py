"""One traced forward and backward: which storage lives from when to when, who holds it, and how long forwards take.

Hooks on what autograd saves tell which node holds a storage, and until when; one that two nodes save is still one.
What it costs: one run that is slower than a plain one; the seconds are of other runs, which only have two
hooks per candidate module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes, Pack, StorageLife, at_each_gradient

__all__ = ["Call", "Trace", "time_forwards", "trace_run"]


@dataclass(slots=True)
class Call:
    """One forward of a candidate module: from when to when, and the storages that it was given."""

    path: str
    start: int
    end: int
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run did. ``backward`` is the operation at which autograd first wanted something back."""

    lives: tuple[StorageLife, ...]
    calls: tuple[Call, ...]
    length: int
    backward: int


def trace_run(model: nn.Module, run: Callable[[], Any], candidates: Mapping[str, nn.Module]) -> Trace:
    """Runs once and tells what happened. The hooks that this needs are gone afterwards."""
    live = LiveBytes(trial=True)
    calls: list[Call] = []

    def pack(tensor: Tensor) -> _Held:
        held = _Held(tensor, Pack(live.clock), live)
        place = live.place(tensor)
        if place is not None:
            live.lives[place].packs.append(held.record)
        return held

    def unpack(held: _Held) -> Tensor:
        live.backward = live.clock if live.backward is None else live.backward
        held.record.wanted = live.clock if held.record.wanted is None else held.record.wanted
        live.clock += 1  # a recomputation would come before the operation that wants this
        return held.tensor

    def begin(path: str, args: Any, kwargs: Any) -> None:
        given = (live.place(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        live.clock += 1  # the borders have a time of their own: results are saved after their operation
        calls.append(Call(path, live.clock, -1, tuple({place for place in given if place is not None})))

    def end(path: str) -> None:
        live.clock += 1
        for call in reversed(calls):
            if call.path == path and call.end < 0:
                call.end = live.clock
                return

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with _around_forwards(candidates, begin, end), at_each_gradient(model, live.leave_out), hooks, live:
        run()
    for life in live.lives:
        life.freed = live.clock if life.freed is None else life.freed
        for record in life.packs:
            record.released = live.clock if record.released is None else record.released
    done = tuple(call for call in calls if call.end >= 0)
    backward = live.clock if live.backward is None else live.backward
    return Trace(tuple(live.lives), done, live.clock + 1, backward)


def time_forwards(
    run: Callable[[], Any], candidates: Mapping[str, nn.Module], device: torch.device
) -> tuple[float, dict[str, float]]:
    """Runs once and returns the seconds of the run, and of all forwards of each candidate."""
    seconds = dict.fromkeys(candidates, 0.0)
    started: dict[str, list[float]] = {path: [] for path in candidates}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def begin(path: str, *_: Any) -> None:
        started[path].append(now())

    def end(path: str) -> None:
        if started[path]:
            seconds[path] += now() - started[path].pop()

    with _around_forwards(candidates, begin, end):
        start = now()
        run()
        return now() - start, seconds


class _Held:
    """What autograd holds in place of a saved tensor; it says when it is let go of."""

    def __init__(self, tensor: Tensor, record: Pack, live: LiveBytes) -> None:
        self.tensor, self.record, self._live = tensor, record, live

    def __del__(self) -> None:
        self.record.released = self._live.clock


@contextmanager
def _around_forwards(
    modules: Mapping[str, nn.Module], begin: Callable[[str, Any, Any], None], end: Callable[[str], None]
) -> Iterator[None]:
    with ExitStack() as stack:
        for path, module in modules.items():

            def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                begin(path, args, kwargs)

            def after(*_: Any, path: str = path) -> None:
                end(path)

            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, prepend=True).remove)
        yield
