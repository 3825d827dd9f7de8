"""The search against a limit that is known; the largest size is exact, and trials are few."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightning_speedkit.memory.batch_size_find import BatchSizeTrial, find_batch_size, search_sizes
from tests.memory.scarce import quick_collections

MEMORY = random.Random(5).sample(range(1, 10_000), 10)


@pytest.mark.parametrize("most", [*MEMORY, 1, 2, 3, 4, 1023, 1024, 1025, 10_000])
def test_the_largest_size_is_exact_in_few_trials(most: int) -> None:
    def attempt(size: int) -> BatchSizeTrial:
        return BatchSizeTrial(size, size, size <= most, "" if size <= most else "training", 1.0)

    for start in (1, 2, 64):
        found = search_sizes(attempt, start, 10_000, "memory")
        assert found.batch_size == most
        assert found.trials[0].size == start
        assert any(trial.size == most and trial.fits for trial in found.trials)
        assert len(found.trials) <= 2 * math.log2(max(most, start)) + 2
        assert max(trial.size for trial in found.trials) <= 10_000


def test_a_limit_that_is_no_power_of_two_is_tried_and_not_passed() -> None:
    with quick_collections():
        found = find_batch_size(lambda samples: None, limit=100)
    assert [trial.size for trial in found.trials] == [2, 4, 8, 16, 32, 64, 100]
    assert found.batch_size == 100


def test_throughput_ends_when_two_sizes_bring_no_more() -> None:
    seconds = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.02, 16: 2.02, 32: 4.1, 64: 8.0}

    def attempt(size: int) -> BatchSizeTrial:
        return BatchSizeTrial(size, size, True, "", seconds[size])

    found = search_sizes(attempt, 1, 64, "throughput")
    assert [trial.size for trial in found.trials] == [1, 2, 4, 8, 16, 32]
    assert found.batch_size == 8


def test_other_errors_go_on_and_a_step_that_never_fits_is_told() -> None:
    def fails(samples: int) -> None:
        raise ZeroDivisionError

    def no_room(samples: int) -> None:
        raise MemoryError

    with pytest.raises(ZeroDivisionError):
        find_batch_size(fails, limit=8)
    with quick_collections(), pytest.raises(torch.OutOfMemoryError, match="Not even a batch of 1 fits"):
        find_batch_size(no_room, limit=8)


def test_the_margin_is_in_the_batches() -> None:
    asked = []
    found = find_batch_size(asked.append, limit=10, start=10, margin=0.2, steps=2)
    assert asked == [12, 12]
    assert found.trials[0].samples == 12
