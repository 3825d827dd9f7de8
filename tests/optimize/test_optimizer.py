"""Each name is the optimizer that it says, against formulas written out; and what it trains."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.optimize.optimizer import OPTIMIZERS, build_optimizer
from lightning_speedkit.optimize.optimizer_groups import parameter_settings
from lightning_speedkit.optimize.schedule import build_schedule
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW

LR, DECAY, STEPS = 0.1, 0.04, 4
has_torchao = importlib.util.find_spec("torchao") is not None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.head(torch.tanh(self.second(torch.tanh(self.first(x))))))


def _adam(p: Tensor, g: Tensor, state: dict[str, Any], decay: float, *, decoupled: bool) -> Tensor:
    if decoupled:
        p = p - LR * decay * p
    else:
        g = g + decay * p
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = m = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = v = 0.999 * state.get("v", 0) + 0.001 * g * g
    return p - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def _nesterov(p: Tensor, g: Tensor, state: dict[str, Any], decay: float) -> Tensor:
    g = g + decay * p
    state["b"] = b = 0.9 * state["b"] + g if "b" in state else g
    return p - LR * (g + 0.9 * b)


FORMULAS = {
    "adamw": ({}, lambda *a: _adam(*a, decoupled=True)),
    "adam": ({}, lambda *a: _adam(*a, decoupled=False)),
    "sgd-momentum": ({"nesterov": True}, _nesterov),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_are_those_of_the_formula_written_out(name: str) -> None:
    options, formula = FORMULAS[name]
    net = Net().double()
    optimizer = build_optimizer(name, net, LR, DECAY, options=options)
    assert all(group["fused"] is True for group in optimizer.param_groups)
    expected = {key: p.detach().clone() for key, p in net.named_parameters()}
    states: dict[str, dict[str, Any]] = {key: {} for key in expected}
    for step in range(STEPS):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for key, p in net.named_parameters():
            if p.grad is not None:
                decay = DECAY if p.ndim == 2 else 0.0
                expected[key] = formula(expected[key], p.grad, states[key], decay)
        optimizer.step()
    torch.testing.assert_close(dict(net.named_parameters()), expected, rtol=1e-12, atol=1e-12, check_stride=False)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("adamw-8bit", "adamw-cpu-offload")])
def test_every_name_trains_what_is_trainable_and_nothing_else(name: str) -> None:
    net = Net()
    before = {key: p.detach().clone() for key, p in net.named_parameters()}
    optimizer = build_optimizer(name, net, 0.01)
    first = None
    for _ in range(20):
        optimizer.zero_grad()
        loss = net(torch.ones(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    changed = {key for key, p in net.named_parameters() if not torch.equal(p, before[key])}
    assert changed == {key for key in before if not key.startswith("frozen")}
    assert net(torch.ones(4, 3)).square().mean().item() < first
    decays = {d for d in (group["weight_decay"] for group in optimizer.param_groups) if d}
    assert decays == ({OPTIMIZERS[name].weight_decay} - {0.0})


def test_fused_is_left_to_torch_where_the_kernels_would_refuse_and_to_the_user_where_asked() -> None:
    net = nn.Linear(2, 2, dtype=torch.complex64)
    assert build_optimizer("adamw", net, 0.1).param_groups[0]["fused"] is None
    assert build_optimizer("adamw", Net(), 0.1, options={"fused": False}).param_groups[0]["fused"] is False
    assert build_optimizer("adamw", Net(), 0.1, options={"foreach": True}).param_groups[0]["fused"] is None


def test_options_and_layers_reach_the_optimizer() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = build_optimizer("adamw", net, 1.0, layer_decay=0.25, options={"betas": [0.8, 0.9]})
    assert [(g["lr"], g["betas"]) for g in optimizer.param_groups] == [(0.25, (0.8, 0.9)), (1.0, (0.8, 0.9))]
    free = build_optimizer("schedule-free", net, 1.0, options={"warmup_steps": 7})
    assert isinstance(free, ScheduleFreeAdamW)
    assert free.param_groups[0]["warmup_steps"] == 7


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    net = Net()
    optimizer = build_optimizer("muon", net, 0.01)
    names = {id(p): name for name, p in net.named_parameters()}
    of_muon = {names[id(p)] for g in optimizer.param_groups if g["muon"] for p in g["params"]}
    assert of_muon == {"first.weight", "second.weight"}
    held = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    assert sorted(held) == sorted(s.name for s in parameter_settings(net, 0.01))
    assert len({g["name"] for g in optimizer.param_groups}) == len(optimizer.param_groups)
    with pytest.raises(ValueError, match=r"nothing for Muon.*Use 'adamw'"):
        build_optimizer("muon", nn.Linear(2, 2), 0.01)


@pytest.mark.slow  # compiles
@pytest.mark.skipif(not has_torchao, reason="needs torchao")
def test_states_of_8_bits_train_nearly_as_adamw_does_and_are_restored() -> None:
    nets = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 2, bias=False)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    before = nets[0][0].weight.detach().clone()
    for net, name in zip(nets, ("adamw", "adamw-8bit"), strict=True):
        optimizer = build_optimizer(name, net, 0.01)
        schedule = build_schedule("linear", optimizer, 10)
        for step in range(10):
            optimizer.zero_grad()
            net(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            schedule.step()
    moved = [net[0].weight - before for net in nets]
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert type(optimizer.state[nets[1][0].weight]["exp_avg"]).__name__ == "OptimState8bit"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": "adam_w"}, ValueError, r"no optimizer 'adam_w'. Did you mean 'adamw'\?"),
        ({"name": ["adam"]}, TypeError, "name of the optimizer is text, one of adamw, adam, .*; got list"),
        ({"name": Net(), "module": "adamw"}, TypeError, "name of the optimizer is text, .*; got Net"),
        ({"module": Net().parameters()}, TypeError, "The module itself is asked for, .*; got generator"),
        ({"lr": -1}, ValueError, "lr=-1 must be 0 or more"),
        ({"lr": "1e-3"}, TypeError, r"lr='1e-3' must be a number; got str. .*: 0.001\."),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1 must be 0 or more"),
        ({"layer_decay": 0}, ValueError, "layer_decay=0 must be above 0 and at most 1"),
        ({"layer_decay": 0.5, "layers": "first"}, TypeError, "layers='first' must be a list"),
        ({"layer_decay": 0.5, "layers": []}, ValueError, r"layers=\[\] is empty"),
        ({"layers": ["first"]}, ValueError, "has no effect without a layer_decay below 1"),
        ({"decay_all": "no"}, TypeError, "decay_all='no' must be true or false; got str"),
        ({"options": {"nesterov": True}}, ValueError, "no option of adamw 'nesterov'. .*Known: betas, eps, amsgrad"),
        ({"options": {"weight_decay": 0.1}}, ValueError, "weight_decay is no option of 'adamw' but an argument"),
        ({"options": {"betas": [0.9, 1.5]}}, ValueError, r"betas\[1\]=1.5 must be 0 or more, and below 1"),
        (
            {"options": {"eps": -1.0}},
            ValueError,
            "The optimizer 'adamw' refuses the options {'eps': -1.0}: Invalid eps",
        ),
        (
            {"options": {"fused": True, "foreach": True}},
            ValueError,
            "refuses the options .*`fused` and `foreach` cannot",
        ),
        (
            {"name": "muon", "options": {"adjust_lr_fn": "rms"}},
            ValueError,
            "'muon' refuses the options .*rms is not supported",
        ),
        ({"name": "muon", "options": {"ns_steps": 2.5}}, ValueError, "ns_steps=2.5 must be a whole number"),
        ({"name": "schedule-free", "options": {"betas": [0, 0.9]}}, ValueError, "'schedule-free' refuses the options"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_optimizer(**{"name": "adamw", "module": Net(), "lr": 0.1, **given})


def test_a_missing_library_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"torchao.*pip install 'lightning-speedkit\[ao\]'"):
        build_optimizer("adamw-8bit", Net(), 0.1)
