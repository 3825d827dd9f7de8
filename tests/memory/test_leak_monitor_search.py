"""The search for a leak, on counters made up here and counts of things that really grow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_speedkit.memory import leak_monitor_search
from lightning_speedkit.memory.leak_monitor_census import Census
from lightning_speedkit.memory.leak_monitor_search import LeakSearch

_CPU = torch.device("cpu")


class Run:
    """Counters that follow a function of the step; and what each count would find, or a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, census: Callable[[int], Census] | None = None) -> None:
        self.step, self.counted = 0, 0
        self.host: Callable[[int], float] = lambda step: 1e6
        self.blocks: Callable[[int], float] = lambda step: 1e5
        self.roots: dict[str, Any] = {}
        monkeypatch.setattr(LeakSearch, "_read", lambda search: (self.host(self.step), 0, self.blocks(self.step)))
        if census is not None:
            monkeypatch.setattr(leak_monitor_search, "take_census", lambda: self._count(census))
        self.search = LeakSearch(lambda: self.roots, _CPU, 32, 256, trace=False)

    def _count(self, census: Callable[[int], Census]) -> Census:
        self.counted += 1
        return census(self.step)

    def steps(self, count: int, left: float = 0) -> Iterator[Any]:
        for number in range(count):
            self.step += 1
            if self.search.wants(self.step):
                yield self.search.look(self.step, left + count - number - 1)

    def found(self, count: int, left: float = 0) -> list[Any]:
        return [leak for leak in self.steps(count, left) if leak is not None]


def _growing(step: int) -> Census:
    return Census(lengths={1: step})


def _tensors(step: int) -> Census:
    return Census(tensors={"torch.float32 [100] on cpu": step})  # type: ignore[arg-type]


def test_a_run_without_growth_is_never_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, _growing)
    assert run.found(2000) == []
    assert run.counted == 0


def test_what_grows_in_one_epoch_is_told_when_it_grows_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, _tensors)
    run.blocks = lambda step: 2 * step
    assert run.found(250) == []
    assert run.search.border(run.step) is None
    (leak,) = run.found(30)
    assert (leak.kind, leak.what, leak.per_step) == ("tensors", "torch.float32 [100] on cpu", 1.0)
    assert leak.bytes_per_step == 912.0
    assert 70 <= leak.first_step <= 80
    assert leak.last_step - leak.first_step == 120
    assert run.counted == 6


def test_a_data_set_that_keeps_what_it_has_read_grows_in_the_first_epoch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: _tensors(min(step, 250)))
    run.blocks = lambda step: 2 * min(step, 250)
    assert run.found(250) == []
    assert run.search.border(run.step) is None
    assert run.found(250) == []
    assert run.search.border(run.step, last=True) is None


def test_what_is_let_go_at_the_border_is_no_leak_not_even_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start = 0
    run = Run(monkeypatch, lambda step: _tensors(step - start))
    run.blocks = lambda step: 2 * (step - start)
    for _ in range(4):
        assert run.found(300) == []
        start = run.step
        assert run.search.border(run.step) is None


def test_it_is_told_at_once_if_memory_would_not_last_for_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_monitor_search, "read_available_bytes", lambda device: 912 * 1000)
    run = Run(monkeypatch, _tensors)
    run.blocks = lambda step: 2 * step
    assert len(run.found(250, left=1000)) == 1


def test_growth_that_ends_during_the_counts_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: _tensors(min(step, 150)))
    run.blocks = lambda step: 2 * min(step, 150)
    assert run.found(600) == []
    assert run.search.border(run.step) is None
    assert run.counted == 4


def test_small_growth_is_none_and_a_graph_is_always_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Run(monkeypatch, lambda step: Census(lengths={1: step}))
    small.blocks = lambda step: step
    assert small.found(400) == []
    assert small.search.border(small.step) is None
    graph = Run(monkeypatch, lambda step: Census(nodes={"torch.float32 [] on cpu": step}))
    graph.blocks = lambda step: step
    (leak,) = graph.found(150)  # after two counts, and without waiting for the next epoch
    assert leak.kind == "graph"


def test_a_cache_that_has_a_limit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: Census(caches={"f": (step, 5000)}, tensors=_tensors(step).tensors))
    run.blocks = lambda step: step
    assert run.found(800) == []
    assert run.search.border(run.step) is None


def test_garbage_is_a_leak_only_with_the_collector_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        run = Run(monkeypatch, lambda step: Census(garbage=500))
        run.blocks = lambda step: 4 * step
        try:
            if not enabled:
                gc.disable()
            assert run.found(250) == []
        finally:
            gc.enable()
        assert (run.search.border(run.step, last=True) is None) is enabled


def test_memory_that_no_object_accounts_for_takes_three_suspicions(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: Census())
    run.host = lambda step: 10_000.0 * step
    assert run.found(500) == []
    found = run.found(400)
    leak = found[0] if found else run.search.border(run.step)
    assert leak is not None
    assert (leak.kind, leak.bytes_per_step) == ("unnamed", 10_000.0)


def test_the_line_that_allocates_is_traced_and_tracing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(kept=[])
    monkeypatch.setattr(
        leak_monitor_search, "take_census", lambda: Census(lengths={id(model.kept): len(model.kept)}, garbage=0)
    )
    search = LeakSearch(lambda: {"Net": model}, _CPU, 0, 256, trace=True)
    for step in range(1, 250):
        model.kept.append("x" * 2000 + str(step))
        assert search.look(step, 1) is None
    leak = search.border(249, last=True)
    assert leak is not None
    assert leak.owner == "Net.kept"
    assert leak.site.startswith(__file__)
    assert not tracemalloc.is_tracing()
    assert leak.bytes_per_step == pytest.approx(2060, rel=0.1)


def test_closing_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, _tensors)
    run.blocks = lambda step: step
    run.search = LeakSearch(lambda: {}, _CPU, 0, 256, trace=True)
    assert run.found(80) == []
    assert tracemalloc.is_tracing()
    run.search.close()
    assert not tracemalloc.is_tracing()
