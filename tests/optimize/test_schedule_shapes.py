"""Shapes against torch's own schedulers, and against what must hold for any of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_speedkit.optimize.schedule_shapes import (
    constant_at,
    inverse_sqrt_at,
    linear_at,
    one_cycle_at,
    warmup_cosine_at,
    warmup_stable_decay_at,
)

N = 40
FALLING: list[Callable[..., float]] = [linear_at, warmup_cosine_at, one_cycle_at, warmup_stable_decay_at]


def _rates(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule, rates = make(optimizer), []
    for step in range(N):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < N - 1:
            schedule.step()
    return rates


def test_one_cycle_is_that_of_torch() -> None:
    theirs = _rates(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=N))
    peak = (0.3 * N - 1) / (N - 1)
    assert [one_cycle_at(step / (N - 1), warmup=peak) for step in range(N)] == pytest.approx(theirs, abs=1e-9)


def test_cosine_and_line_are_those_of_torch_after_their_rise() -> None:
    cosine = _rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, N, eta_min=0.1))
    line = _rates(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, N))
    for step in range(N):
        progress = 0.2 + 0.8 * step / N
        assert warmup_cosine_at(progress, 0.2, 0.1) == pytest.approx(cosine[step], abs=1e-9)
        assert linear_at(progress, 0.2, 0.1) == pytest.approx(line[step], abs=1e-9)
        assert constant_at(0.2 * step / N, 0.2) == pytest.approx(step / N)


def test_stable_decay_and_inverse_root_by_hand() -> None:
    shares = {0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.7: 0.5, 0.8: 1 - math.sqrt(0.5), 1.0: 0.0}
    for progress, scale in shares.items():
        power = 1.0 if progress == 0.7 else 0.5
        expected = 0.75 if progress == 0.7 else scale
        assert warmup_stable_decay_at(progress, 0.1, 0.0, 0.4, power) == pytest.approx(expected)
    assert warmup_stable_decay_at(0.9, warmup=0.8, decay=0.5, power=1.0) == pytest.approx(0.5)  # falls after the rise
    assert [inverse_sqrt_at(p, 0.01) for p in (0.005, 0.01, 0.04, 0.25)] == pytest.approx([0.5, 1.0, 0.5, 0.2])


@given(st.sampled_from(FALLING), st.floats(0, 1), st.floats(0, 0.9), st.floats(0, 1))
def test_every_shape_stays_between_0_and_1_and_ends_at_final(
    shape: Callable[..., float], progress: float, warmup: float, final: float
) -> None:
    assert 0 <= shape(progress, warmup, final) <= 1
    assert shape(1.0, warmup, final) == pytest.approx(final)
    assert shape(warmup, warmup, final) == pytest.approx(1.0)
    later = progress + (1 - progress) / 2
    if progress >= warmup:
        assert shape(later, warmup, final) <= shape(progress, warmup, final) + 1e-12
