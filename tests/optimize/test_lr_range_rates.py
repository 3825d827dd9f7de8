"""Scaling the rates of a schedule gives the schedule that was built with the larger rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_speedkit.optimize.lr_range_rates import LearningRates, scale_schedule

SCHEDULES: dict[str, Callable[[Any, float], Any]] = {
    "lambda": lambda o, rate: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),
    "step": lambda o, rate: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o, rate: lr_scheduler.CosineAnnealingLR(o, 8),
    "restarts": lambda o, rate: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one-cycle": lambda o, rate: lr_scheduler.OneCycleLR(o, [rate, 0.1 * rate], total_steps=8, cycle_momentum=False),
    "cyclic": lambda o, rate: lr_scheduler.CyclicLR(
        o, [0.1 * rate, 0.01 * rate], [rate, 0.1 * rate], step_size_up=2, cycle_momentum=False
    ),
    "sequential": lambda o, rate: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "chained": lambda o, rate: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "none": lambda o, rate: None,
}


def _two_groups(rate: float) -> torch.optim.Optimizer:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return torch.optim.SGD([{"params": [one], "lr": rate}, {"params": [other], "lr": 0.1 * rate}])


def _rates(optimizer: Any, scheduler: Any) -> list[float]:
    found = []
    for _ in range(7):
        found += [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scaled_schedule_is_the_one_of_the_larger_rate(name: str) -> None:
    scaled, built = _two_groups(0.1), _two_groups(0.3)
    scheduler = SCHEDULES[name](scaled, 0.1)
    scale_schedule(scaled, [] if scheduler is None else [scheduler], 0.3)
    assert _rates(scaled, scheduler) == pytest.approx(_rates(built, SCHEDULES[name](built, 0.3)), rel=1e-12)


def test_tensors_of_rates_are_filled_and_zeros_are_set() -> None:
    weight = nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([weight], lr=rate, capturable=False, foreach=False)
    scale_schedule(optimizer, [], 0.2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.2)
    still = torch.optim.SGD([weight], lr=0.0)
    assert LearningRates(still).ratios == (1.0,)
    scale_schedule(still, [], 0.2)
    assert still.param_groups[0]["lr"] == 0.2


def test_ratios_are_those_of_the_highest_rates_of_the_schedules() -> None:
    optimizer = _two_groups(0.5)
    lr_scheduler.LambdaLR(optimizer, [lambda step: 0.0, lambda step: 1.0])
    rates = LearningRates(optimizer)
    assert rates.leading == 0.5
    assert rates.ratios == (1.0, 0.1)
