"""The loss of a step is the plain mean of its micro-batches, however they are accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from tests.optimize.line import Line, loader, trainer
from tests.optimize.test_spike_guard import assert_equal, batches, fit, without


def test_the_loss_of_a_window_is_the_mean_of_its_micro_batches() -> None:
    """A micro-batch of 6 in a window of 2 is a mean of 3.5 and a spike; one of 4 is 2.5 and none."""
    guard = SpikeGuard(window=3)
    found = fit(batches(23, {9: 6.0, 13: 4.0, 22: 9.0}), guard, AccumulationScheduler(2))
    assert guard.spikes == 2  # the last window is short
    plain = fit(without(batches(23, {13: 4.0}), 8, 9, 22), AccumulationScheduler(2))
    assert_equal(found, plain)


@pytest.mark.parametrize(
    ("accumulation", "options", "sizes"),
    [
        (None, {"accumulate_grad_batches": 3}, [3, 3, 3, 3]),
        (AccumulationScheduler(3), {}, [3, 3, 3, 3]),
        (AccumulationScheduler({0: 1, 2: 4, 4: 2}, unit="step"), {}, [1, 1, 4, 4, 2]),
        (AccumulationScheduler(target_batch=5), {}, [3, 2, 3, 2, 2]),  # of 2, 2, 2, 3, 2, 2, 2, 2, 3, 2, 2, 2 samples
    ],
)
def test_the_mean_is_right_whatever_the_loss_is_divided_by(accumulation: Any, options: Any, sizes: list[int]) -> None:
    """With a learning rate of 0 the loss of a micro-batch is the mean of its numbers, about 1: nothing is a spike."""
    data = [torch.ones(3 if place in (3, 8) else 2) + place / 100 for place in range(12)]
    guard = SpikeGuard(threshold=0.5, window=2, max_in_a_row=1)
    run = trainer(guard, *([] if accumulation is None else [accumulation]), **options)
    run.fit(Line(lr=0.0, dtype=torch.float32), loader(data))
    assert guard.spikes == 0
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    means = [1 + sum(range(start, start + size)) / size / 100 for start, size in zip(starts, sizes, strict=True)]
    assert guard.state_dict()["recent"] == pytest.approx(means, rel=1e-6)
