"""What is counted when one setting of a loader is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.settings import trial_measurement as module
from lightning_speedkit.data.settings.trial_measurement import (
    LoaderJob,
    batches_per_second,
    bytes_of,
    with_short_batches,
)


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
    rate = batches_per_second(iterator, together, seconds=1.0)
    assert rate == pytest.approx(together / 0.5)


def test_batches_become_short_where_samples_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)

    class Slow(list[int]):
        def __getitem__(self, index: Any) -> Any:
            clock.now += 0.02
            return 1

    job = LoaderJob(dataset=Slow(range(100)), batch_size=64)
    assert with_short_batches(job, 0.4).batch_size == 5  # a quarter of 0.4 s
    assert with_short_batches(job, 0.001).batch_size == 1
    assert with_short_batches(job, 100.0).batch_size == 64
    whole = LoaderJob(dataset=Slow(range(100)), batch_size=None)
    assert with_short_batches(whole, 0.001) is whole
