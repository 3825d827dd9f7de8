"""Schedule-free AdamW against its formulas written out, and saved states against a run that goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import nn

from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW

LR, BETA1, BETA2, DECAY, WARMUP = 0.1, 0.8, 0.9, 0.05, 3


def _equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_steps_are_those_of_the_formulas_written_out() -> None:
    torch.manual_seed(0)
    target = torch.randn(3, 2, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = ScheduleFreeAdamW([weight], LR, (BETA1, BETA2), 1e-8, DECAY, WARMUP)
    x = z = torch.zeros_like(target)
    v, squares = torch.zeros_like(target), 0.0
    for t in range(1, 9):
        y = (1 - BETA1) * z + BETA1 * x
        gradient = 2 * (y - target)
        v = BETA2 * v + (1 - BETA2) * gradient**2
        rate = LR * min(1.0, t / WARMUP)
        squares += rate**2
        update = gradient / ((v / (1 - BETA2**t)).sqrt() + 1e-8) + DECAY * y
        z = z - rate * update
        x = (1 - rate**2 / squares) * x + rate**2 / squares * z
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        kept = weight.grad.clone()
        optimizer.step()
        _equal(weight.grad, kept)  # whoever looks at the gradient after the step still sees it
        torch.testing.assert_close(weight.detach(), (1 - BETA1) * z + BETA1 * x, rtol=1e-10, atol=1e-12)
    training = weight.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), x, rtol=1e-10, atol=1e-12)
    optimizer.eval()
    with pytest.raises(RuntimeError, match="averaged weights are in place"):
        optimizer.step()
    optimizer.train()
    _equal(weight.detach(), training)


@pytest.mark.parametrize("saved_in_eval", [False, True])
def test_a_saved_state_goes_on_bit_for_bit_from_averaged_weights(saved_in_eval: bool) -> None:
    def train(weights: list[nn.Parameter], optimizer: ScheduleFreeAdamW, steps: range) -> None:
        for step in steps:
            for p in weights:
                p.grad = torch.sin(p.detach() + step)
            optimizer.step()

    weights = [nn.Parameter(torch.linspace(0, 1, 5)), nn.Parameter(torch.ones(2, 2))]
    unused = nn.Parameter(torch.ones(1))
    optimizer = ScheduleFreeAdamW([{"params": [weights[0], unused]}, {"params": [weights[1]], "lr": 0.01}])
    train(weights, optimizer, range(3))
    training = [p.detach().clone() for p in weights]
    optimizer.eval()
    averaged = [p.detach().clone() for p in weights]
    if not saved_in_eval:
        optimizer.train()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    others = [nn.Parameter(p) for p in averaged]
    resumed = ScheduleFreeAdamW([{"params": [others[0], nn.Parameter(torch.ones(1))]}, {"params": [others[1]]}])
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    _equal([p.detach() for p in others], training)
    optimizer.train()
    train(weights, optimizer, range(3, 6))
    train(others, resumed, range(3, 6))
    _equal(others, weights)
    _equal(list(resumed.averages().values()), list(optimizer.averages().values()))


@pytest.mark.parametrize("averaged", [False, True])
def test_whoever_moves_its_state_away_frees_every_copy_of_the_weights(averaged: bool) -> None:
    """Lightning does that when a fit ends; ``meta`` is a device that each machine has."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = ScheduleFreeAdamW([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    if averaged:
        optimizer.eval()
    _optimizer_to_device(optimizer, torch.device("meta"))
    held = [t for value in vars(optimizer).values() if isinstance(value, dict) for t in _tensors_in(value)]
    assert len(held) == (3 if averaged else 2)
    assert {t.device.type for t in held} == {"meta"}


def _tensors_in(found: dict[Any, Any]) -> list[torch.Tensor]:
    inner = [_tensors_in(value) for value in found.values() if isinstance(value, dict)]
    return [value for value in found.values() if isinstance(value, torch.Tensor)] + [t for ts in inner for t in ts]


def test_wrong_numbers_are_refused() -> None:
    weight = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="the first must lie between 0 and 1"):
        ScheduleFreeAdamW(weight, betas=(0.0, 0.9))
    with pytest.raises(ValueError, match="lr=-1 must be 0 or more"):
        ScheduleFreeAdamW(weight, lr=-1)
