"""What an optimizer takes over from the one that it replaces, against a table written by hand."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.optimize.optimizer_replacement import replaced_optimizer


def test_only_what_the_module_trains_is_trained_at_the_rates_that_it_has() -> None:
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    groups = [
        {"params": net["body"].parameters(), "lr": 0.1},
        {"params": net["head"].parameters(), "weight_decay": 0.3},
    ]
    own = torch.optim.Adam(groups, lr=0.2)
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
