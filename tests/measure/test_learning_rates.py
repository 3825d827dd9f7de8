"""Scaled learning rates: those of an optimizer and a schedule that were made with the larger rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from lightning_speedkit.measure.learning_rates import scale_rates

SCHEDULES: dict[str, Callable[[Any, float], Any]] = {
    "step": lambda optimizer, rate: schedules.StepLR(optimizer, 2),
    "exponential": lambda optimizer, rate: schedules.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer, rate: schedules.CosineAnnealingLR(optimizer, 8),
    "one cycle": lambda optimizer, rate: schedules.OneCycleLR(optimizer, [rate, 2 * rate], total_steps=8),
    "in a sequence": lambda optimizer, rate: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.5, total_iters=3), schedules.StepLR(optimizer, 2)], [3]
    ),
}


def _made(name: str, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": times * rate} for times in (1.0, 2.0)]
    optimizer = torch.optim.SGD(groups, lr=rate)
    return optimizer, SCHEDULES[name](optimizer, rate)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_are_those_of_a_schedule_made_with_the_scaled_rate(name: str) -> None:
    (scaled, schedule), (expected, of_expected) = _made(name, 0.1), _made(name, 0.4)
    scale_rates([scaled], [schedule], 4.0)
    for _ in range(7):
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (scaled, expected)]
        assert rates[0] == pytest.approx(rates[1])
        assert schedule.get_last_lr() == pytest.approx(of_expected.get_last_lr())
        for step in (scaled.step, schedule.step, expected.step, of_expected.step):
            step()


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scale_rates([optimizer], [], 2.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
