"""Scores, schedules and skipped steps in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_speedkit.compress.prune_fit import FitPruning
from lightning_speedkit.compress.prune_masks import PruningMasks


def _layer() -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    return layer


def _fit(layer: nn.Module, **settings: Any) -> FitPruning:
    masks = PruningMasks(dict(layer.named_parameters()))
    fit = FitPruning(masks, **{"target": 0.5, "start": 0, "end": 4, "every": 1, **settings})
    fit.begin({})
    return fit


def _step(fit: FitPruning, optimizer: torch.optim.Optimizer, gradient: list[float], number: int = 1) -> Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.tensor([gradient])
    fit.before_step(optimizer, number)
    optimizer.step()
    return weight.detach().clone()


def _movement(fit: FitPruning) -> list[float]:
    return fit.state_dict()["movement"]["weight"].flatten().tolist()  # type: ignore[no-any-return]


def test_movement_is_the_sum_of_weight_times_minus_gradient() -> None:
    layer = _layer()
    fit = _fit(layer, movement=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    after = _step(fit, optimizer, [0.5, -1.0, -0.25, 0.0])
    assert after.tolist() == [[0.5, -1.0, 3.25, 4.0]]
    assert _movement(fit) == [-0.5, -2.0, 0.75, 0.0]
    _step(fit, optimizer, [0.0, 0.0, 1.0, -1.0])
    assert _movement(fit) == [-0.5, -2.0, 0.75 - 3.25, 4.0]
    fit.prune_if_due(4, [optimizer])
    assert layer.weight.tolist() == [[0.5, 0.0, 0.0, 5.0]]


def test_a_step_that_is_dropped_or_left_out_moves_no_score() -> None:
    layer = _layer()
    fit = _fit(layer, movement=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.full((1, 4), float("nan"))
    fit.before_step(optimizer, 1)
    layer.weight.grad = None  # as a guard does
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(layer(torch.ones(1, 4)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        fit.before_step(optimizer, 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert _movement(fit) == [-1.0, 2.0, -3.0, -4.0]  # of the last one: its gradient is 1


class _Fused(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """On a GPU this takes the scale off, or does nothing where an infinity was found."""


@pytest.mark.parametrize(("found_inf", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_scale_that_a_fused_optimizer_takes_off_itself(found_inf: float, factor: float) -> None:
    layer = _layer()
    fit = _fit(layer, movement=True)
    optimizer: Any = _Fused(layer.parameters(), lr=0.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
    _step(fit, optimizer, [8.0 if not found_inf else float("inf"), 8.0, 8.0, 8.0])
    assert _movement(fit) == [-factor, 2 * factor, -3 * factor, -4 * factor]


def test_only_the_optimizers_own_weights_are_looked_at() -> None:
    first, second = _layer(), _layer()
    model = nn.ModuleList([first, second])
    fit = _fit(model, movement=True)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    second.weight.grad = torch.ones(1, 4)  # left there by another loss
    _step(fit, optimizer, [1.0, 1.0, 1.0, 1.0])
    scores = fit.state_dict()["movement"]
    assert scores["0.weight"].any()
    assert not scores["1.weight"].any()


def test_schedule_is_followed_to_the_element() -> None:
    model = nn.Linear(100, 10, bias=False)
    fit = _fit(model, target=0.8, start=2, end=12, every=3)
    counts = []
    for step in range(14):
        fit.prune_if_due(step, [])
        counts.append(fit.masks.count())
    at_5, at_8, at_11 = (round(1000 * (0.8 - 0.8 * (1 - n / 10) ** 3)) for n in (3, 6, 9))
    assert counts == [0] * 5 + [at_5] * 3 + [at_8] * 3 + [at_11, 800, 800]
    assert fit.is_done
    assert not fit.is_due(99)


def test_pruning_before_the_first_step() -> None:
    fit = _fit(nn.Linear(10, 1), start=0, end=0)
    assert fit.prune_if_due(0, [])
    assert fit.masks.count() == 6  # of 11, in the weight and the bias that this test gave it


def test_regrowth_falls_to_nothing_and_takes_the_dense_gradient() -> None:
    layer = nn.Linear(8, 1, bias=False)
    layer.weight.data = torch.tensor([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    fit = _fit(layer, target=0.5, end=100, every=50, regrow=0.5)
    fit.masks.prune_to(0.5)
    fit._initial = 0.5
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    after = _step(fit, optimizer, [1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0], number=50)
    assert after.tolist() == [[8.0, 7.0, 6.0, 5.0, 0.0, 0.0, 0.0, 0.0]]
    assert layer.weight.grad.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]  # type: ignore[union-attr]
    fit.prune_if_due(50, [optimizer])  # half of the way: a quarter of four
    assert fit.masks.pruned["weight"].int().tolist() == [[0, 0, 0, 1, 1, 0, 1, 1]]
    _step(fit, optimizer, [1.0] * 8, number=100)
    fit.prune_if_due(100, [optimizer])
    assert fit.masks.pruned["weight"].int().tolist() == [[0, 0, 0, 1, 1, 0, 1, 1]]


def test_momentum_does_not_leak_back() -> None:
    layer = _layer()
    fit = _fit(layer, end=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    _step(fit, optimizer, [1.0, 1.0, 1.0, 1.0])
    fit.prune_if_due(1, [optimizer])
    assert optimizer.state[layer.weight]["momentum_buffer"].tolist() == [[0, 0, 1, 1]]
    for _ in range(3):
        assert _step(fit, optimizer, [1.0, 1.0, 1.0, 1.0])[0, :2].tolist() == [0, 0]
    assert optimizer.state[layer.weight]["momentum_buffer"][0, :2].tolist() == [0, 0]


def test_state_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20, 5)
    fit = _fit(layer, target=0.9, end=10, every=2, movement=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(8, 20)
    for step in range(1, 6):
        layer(x).square().mean().backward()
        fit.before_step(optimizer, step)
        optimizer.step()
        fit.prune_if_due(step, [optimizer])
    other = FitPruning(
        PruningMasks(dict(layer.named_parameters())), target=0.9, movement=True, start=0, end=10, every=2
    )
    other.begin(fit.state_dict())
    for made in (fit, other):
        assert not made.prune_if_due(5, [])
        made.prune_if_due(6, [])
    assert fit.masks.count() == other.masks.count() > 0
    assert all(torch.equal(fit.masks.pruned[n], other.masks.pruned[n]) for n in fit.masks.pruned)


def test_layers_that_change_their_shape_are_refused_and_replaced_ones_found() -> None:
    layer = _layer()
    fit = _fit(layer)
    layer.weight = nn.Parameter(torch.ones(1, 4))
    fit.find_weights(layer)
    assert fit.masks.weights["weight"] is layer.weight
    layer.weight.data = torch.ones(1, 2)  # the same object
    with pytest.raises(MisconfigurationException, match=r"has the shape \(1, 2\) now.*belong in two runs"):
        fit.find_weights(layer)
    with pytest.raises(MisconfigurationException, match=r"a mask of shape \(1, 4\) for 'weight'"):
        fit.before_step(torch.optim.SGD(layer.parameters(), lr=0.1), 1)


def test_finish_leaves_the_optimizer_as_it_was() -> None:
    layer = _layer()
    fit = _fit(layer, end=0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fit.follow(optimizer)
    fit.follow(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    fit.finish()
    assert not optimizer._optimizer_step_post_hooks
