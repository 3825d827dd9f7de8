"""One optimizer equals the two separate ones of torch, bit for bit, also after it was saved, copied and scheduled."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize.muon import MuonWithAdamW, hidden_matrices

MUON = {"momentum": 0.9, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def _ours(net: nn.Sequential) -> MuonWithAdamW:
    matrices = [net[0].weight, net[2].weight]
    others = [net[0].bias, net[2].bias, *net[4].parameters()]
    return MuonWithAdamW(
        [{"params": matrices, "muon": True}, {"params": others, "muon": False, "weight_decay": 0.0}],
        lr=0.01,
        weight_decay=0.1,
        momentum=0.9,
        ns_steps=3,
    )


def _theirs(net: nn.Sequential) -> list[torch.optim.Optimizer]:
    others = [net[0].bias, net[2].bias, *net[4].parameters()]
    muon = torch.optim.Muon([net[0].weight, net[2].weight], lr=0.01, **MUON)  # type: ignore[arg-type]
    return [muon, torch.optim.AdamW(others, lr=0.01, weight_decay=0.0)]


def _train(net: nn.Module, optimizers: list[Any], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = net(torch.randn(8, 3, generator=generator)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def _equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_steps_are_those_of_both_and_a_checkpoint_goes_on_the_same() -> None:
    plain, net = _net(), _net()
    separate, ours = _theirs(plain), _ours(net)
    _train(plain, separate, range(3))
    _train(net, [ours], range(3))
    _equal(net, plain)

    file = io.BytesIO()
    torch.save([net.state_dict(), ours.state_dict()], file)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    loaded = _net()
    loaded.load_state_dict(weights)
    resumed = _ours(loaded)
    resumed.load_state_dict(state)
    both = copy.deepcopy((net, ours))
    _train(plain, separate, range(3, 6))
    for other, optimizer in ((loaded, resumed), both):
        _train(other, [optimizer], range(3, 6))
        _equal(other, plain)


def test_a_schedule_reaches_both_halves() -> None:
    net, plain = _net(), _net()
    ours, separate = _ours(net), _theirs(plain)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, *separate)]
    for step in range(3):
        _train(net, [ours], range(step, step + 1))
        _train(plain, separate, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    _equal(net, plain)
    assert ours.param_groups[0]["lr"] == 0.00125


def test_the_closure_is_called_once_with_gradients() -> None:
    net = _net()
    optimizer, called = _ours(net), []

    def closure() -> torch.Tensor:
        called.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert called == [True]


def test_embeddings_convolutions_and_the_last_layer_are_not_hidden() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.embedding, self.conv = nn.Embedding(5, 4), nn.Conv1d(4, 4, 3)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 5)
            if tied:
                self.head.weight = self.embedding.weight

    assert hidden_matrices(Tied(tied=False)) == ["first.weight", "second.weight"]
    assert hidden_matrices(Tied(tied=True)) == ["first.weight", "second.weight"]
    named = nn.ModuleDict({"debias": nn.Linear(4, 4), "second": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    named.register_parameter("relative_bias", nn.Parameter(torch.zeros(4, 4)))
    assert hidden_matrices(named) == ["debias.weight", "second.weight"]


def test_a_group_has_to_say_whose_it_is() -> None:
    with pytest.raises(ValueError, match='needs the key "muon"'):
        MuonWithAdamW([{"params": [nn.Parameter(torch.eye(2))]}])
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.ones(2))], "muon": True}]).step()
