"""What an optimizer takes over from the one that it replaces, against a table written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.optimize.optimizer import build_from_settings
from lightning_speedkit.optimize.optimizer_groups import parameter_settings
from lightning_speedkit.optimize.optimizer_replacement import inherited_settings, without_schedules


def replaced_optimizer(
    net: nn.Module,
    own: torch.optim.Optimizer,
    name: str,
    lr: float | None = None,
    weight_decay: float | None = None,
    options: dict[str, Any] | None = None,
    **layers: Any,
) -> torch.optim.Optimizer:
    """One factor for all where nothing is given, as OptimizerChoice has it."""
    settings = parameter_settings(
        net, 1.0 if lr is None else lr, 1.0 if weight_decay is None else weight_decay, **layers
    )
    inherits = {"lr": lr is None, "weight_decay": weight_decay is None}
    return build_from_settings(
        name, net, inherited_settings(settings, net, own, name, options=options, **inherits), options
    )


def test_only_what_the_module_trains_is_trained_at_the_rates_that_it_has() -> None:
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    groups = [
        {"params": net["body"].parameters(), "lr": 0.1},
        {"params": net["head"].parameters(), "weight_decay": 0.3},
    ]
    own = torch.optim.Adam(groups, lr=0.2, decoupled_weight_decay=True)
    found = {}
    for group in replaced_optimizer(net, own, "adamw").param_groups:
        for p in group["params"]:
            found[id(p)] = (group["lr"], group["weight_decay"])
    by_hand = {
        id(net["body"].weight): (0.1, 0.0),
        id(net["body"].bias): (0.1, 0.0),
        id(net["head"].weight): (0.2, 0.3),
        id(net["head"].bias): (0.2, 0.0),
    }
    assert found == by_hand
    decayed = replaced_optimizer(net, own, "adamw", lr=1.0, weight_decay=0.5, layer_decay=0.5, layers=["body", "head"])
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in decayed.param_groups for p in g["params"]}
    assert rates[id(net["body"].weight)] == (0.25, 0.5)
    assert rates[id(net["head"].bias)] == (0.5, 0.0)


def test_a_rate_of_another_kind_is_not_kept() -> None:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.7)
    with pytest.raises(MisconfigurationException, match="The learning rate of SGD is none for 'muon'"):
        replaced_optimizer(net, own, "muon")
    (decay, _) = replaced_optimizer(net, own, "adamw", lr=0.01).param_groups
    assert (decay["lr"], decay["weight_decay"]) == (0.01, 0.01)  # AdamW's own decay, not that of SGD
    assert replaced_optimizer(net, own, "sgd-momentum").param_groups[0]["weight_decay"] == 0.7
    net.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is left for 'adam'"):
        replaced_optimizer(net, torch.optim.Adam([net.weight], lr=0.1), "adam")


@pytest.mark.parametrize(
    ("own", "name", "options", "expected", "warns"),
    [
        (lambda p: torch.optim.AdamW(p, weight_decay=0.3), "adam", {}, 0.0, "AdamW .0.3. is taken from the weights"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.3), "adamw", {}, 0.01, "Adam .0.3. is added to the gradient"),
        (lambda p: torch.optim.RAdam(p, weight_decay=0.3), "muon", {}, 0.1, "RAdam .0.3. is added to the gradient"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.0), "adamw", {}, 0.0, None),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.3), "schedule-free", {}, 0.3, None),
        (lambda p: torch.optim.Adamax(p, weight_decay=0.3), "adam", {}, 0.3, None),
        (lambda p: torch.optim.NAdam(p, weight_decay=0.3, decoupled_weight_decay=True), "adamw", {}, 0.3, None),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.3), "adam", {"decoupled_weight_decay": True}, 0.3, None),
    ],
)
def test_a_weight_decay_of_another_kind_is_not_kept(
    own: Callable[[Any], Any], name: str, options: dict[str, Any], expected: float, warns: str | None
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replaced = replaced_optimizer(net, own(net.parameters()), name, options=options)
        given = replaced_optimizer(net, own(net.parameters()), name, options=options, weight_decay=0.7)
    assert replaced.param_groups[0]["weight_decay"] == expected
    assert given.param_groups[0]["weight_decay"] == 0.7
    if warns is None:
        assert not caught
    else:
        (warning,) = caught
        assert f"its own default, {expected:g}. Pass weight_decay" in str(warning.message)
        with pytest.warns(UserWarning, match=warns):
            replaced_optimizer(net, own(net.parameters()), name)


def _cyclic(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, [0.2, 0.3])


_SCHEDULES: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "rises from 0": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: s / 100), [0.1, 0.05]),
    "one-cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.2, 0.3], total_steps=9), [0.2, 0.3]),
    "cyclic": (_cyclic, [0.2, 0.3]),
    "chained": (lambda o: torch.optim.lr_scheduler.ChainedScheduler([_cyclic(o)]), [0.2, 0.3]),
    "sequential": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
            [3],
        ),
        [0.1, 0.05],
    ),
}


@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw"])
def test_without_its_schedule_an_optimizer_is_as_it_was(schedule: str, kind: str) -> None:
    """Rates worked out by hand; all else is as in an optimizer that has never had a schedule."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(2, 2)
        groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.05}]
        sgd = kind == "sgd-momentum"
        return net, (torch.optim.SGD(groups, 0.1, 0.7) if sgd else torch.optim.AdamW(groups, 0.1, (0.8, 0.9)))

    build, rates = _SCHEDULES[schedule]
    _, expected = made()
    net, own = made()
    scheduler = build(own)
    if schedule not in ("cyclic", "chained"):  # whose peak no group has
        replaced = replaced_optimizer(net, own, kind)
        assert [group["lr"] for group in replaced.param_groups] == rates
    without_schedules(own, [scheduler])
    for group, plain, rate in zip(own.param_groups, expected.param_groups, rates, strict=True):
        told = {**plain, "lr": rate}
        assert group.keys() == told.keys()
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in told.items() if k != "params"}
