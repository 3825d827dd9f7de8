"""The function over plain torch, against a plain loop and a loss whose limit of stability is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.optimize.lr_range_sweep import check_range, lr_range_test

SHORT: dict[str, Any] = {"lowest": 1e-4, "highest": 1.0, "steps": 9, "divergence": 1e9}


def _model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": model[:3].parameters(), "lr": 0.002}, {"params": model[3].parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.02)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True) - 2.0).square().mean()


def test_its_losses_are_those_of_a_plain_loop_and_all_is_left_as_it_was() -> None:
    batches = torch.randn(20, 2, generator=torch.Generator().manual_seed(1)).split(4)
    model, optimizer = _model()
    before, random_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    optimizer_before = optimizer.state_dict()
    curve = lr_range_test(model, optimizer, lambda batch: _loss(model, batch), batches, **SHORT)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert optimizer.state_dict() == optimizer_before
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(torch.get_rng_state(), random_state, rtol=0, atol=0)

    assert curve.rates == pytest.approx([10.0 ** (-4 + x / 2) for x in range(9)])
    assert curve.ratios == pytest.approx([0.1, 1.0])
    losses = []
    for number, rate in enumerate(curve.rates):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1 * rate, rate
        optimizer.zero_grad()
        loss = _loss(model, batches[number % 5])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert curve.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("shift", [0.0, -1000.0])
def test_a_loss_that_diverges_stops_it_whatever_its_sign(shift: float) -> None:
    weight = nn.Parameter(torch.ones(1))
    module, taken = nn.ParameterList([weight]), []

    def loss_of(batch: Tensor) -> Tensor:
        taken.append(1)
        return 50.0 * weight.square().sum() + shift  # diverges above a rate of 0.02

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    curve = lr_range_test(module, optimizer, loss_of, [torch.ones(1)], lowest=1e-6, highest=1e6)
    assert curve.diverged
    assert 0.02 < curve.rates[-1] < 20
    assert len(taken) == len(curve.losses) < 100
    assert curve.suggestion is not None
    assert 1e-4 < curve.suggestion < 0.02


def test_one_batch_that_is_unlike_the_others_does_not_stop_it() -> None:
    model, optimizer = _model()
    losses = iter([1.0, 9.0] * 15)
    curve = lr_range_test(model, optimizer, lambda b: model(b).sum() * 0.0 + next(losses), [torch.ones(4, 2)], steps=30)
    assert (len(curve.losses), curve.diverged, curve.suggestion) == (30, False, None)


def test_a_loss_that_is_not_finite_stops_it() -> None:
    module = nn.Linear(1, 1)
    losses = iter([1.0, 1.0, float("inf")])
    curve = lr_range_test(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        lambda batch: module(batch).sum() * 0.0 + next(losses),
        [torch.ones(1)],
    )
    assert (curve.losses, curve.diverged) == ((1.0, 1.0), True)


def test_no_batches_and_a_bad_range_are_told() -> None:
    model, optimizer = _model()
    with pytest.raises(ValueError, match="no training batches"):
        lr_range_test(model, optimizer, lambda batch: _loss(model, batch), [])
    with pytest.raises(ValueError, match="steps=4"):
        check_range(1e-4, 1.0, 4, 4.0)
