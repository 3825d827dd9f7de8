"""The measuring process: what it counts, in which order it reads, and how it ends."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.settings import loader_trials as module
from lightning_speedkit.data.settings.loader_settings import LoaderLimits
from lightning_speedkit.data.settings.loader_trials import LoaderJob, bytes_of, run_trials


@dataclass
class _Pair:
    image: Any
    label: Any


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 4), 48),
        (np.zeros(3), 24),
        (b"12345", 5),
        ("text is not counted", 0),
        (7, 0),
        ([torch.zeros(1), (torch.zeros(1), b"x")], 9),
        ({"a": {"b": torch.zeros(2)}, "c": [np.zeros(1, np.uint8)]}, 9),
        (_Pair(torch.zeros(2), b"abc"), 11),
    ],
)
def test_bytes_of_a_batch(batch: Any, size: int) -> None:
    assert bytes_of(batch) == size


class _Clock:
    """Time that passes only when a batch is taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("together", [1, 2, 4])
def test_the_rate_is_that_of_the_steady_state(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start for 5 s and then bring ``together`` batches at a time every 0.5 s."""
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)

    def batches() -> Any:
        clock.now += 5.0
        while True:
            for number in range(together):
                clock.now += 0.5 if number == 0 else 0.0
                yield number

    iterator = batches()
    next(iterator)
    for _ in range(together - 1):
        next(iterator)
    rate = module._batches_per_second(iterator, together, seconds=1.0)
    assert rate == pytest.approx(together / 0.5)


def test_batches_become_short_where_samples_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)

    class Slow(list[int]):
        def __getitem__(self, index: Any) -> Any:
            clock.now += 0.02
            return 1

    job = LoaderJob(dataset=Slow(range(100)), batch_size=64)
    assert module._with_short_batches(job, 0.4).batch_size == 5  # a quarter of 0.4 s
    assert module._with_short_batches(job, 0.001).batch_size == 1
    assert module._with_short_batches(job, 100.0).batch_size == 64
    whole = LoaderJob(dataset=Slow(range(100)), batch_size=None)
    assert module._with_short_batches(whole, 0.001) is whole


def test_trials_come_with_the_memory_of_a_worker_and_the_bytes_of_a_batch() -> None:
    job = LoaderJob(dataset=torch.zeros(100, 10), batch_size=4)
    trials = run_trials(job, LoaderLimits(max_workers=1), seconds=0.1, patience=60)
    assert [trial.num_workers for trial in trials][:2] == [0, 1]
    assert [trial.failure for trial in trials] == [""] * len(trials)
    assert trials[0].batch_bytes == trials[1].batch_bytes == 160
    assert trials[0].worker_bytes == 0
    assert 2**16 < trials[1].worker_bytes < 2**31
    assert multiprocessing.active_children() == []


def test_in_a_process_that_may_have_no_children_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    (trial,) = run_trials(LoaderJob(dataset=[1], batch_size=1), LoaderLimits(max_workers=1), seconds=0.1, patience=5)
    assert "daemonic processes are not allowed to have children" in trial.failure
