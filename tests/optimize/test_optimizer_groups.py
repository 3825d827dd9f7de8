"""Who decays and how fast each layer learns, against tables written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize.optimizer_groups import layer_numbers, parameter_groups, parameter_settings


class Net(nn.Module):
    """An embedding that the head shares, two blocks, norms of each kind, a frozen layer and a table of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2))
        self.between = nn.LayerNorm((2, 4))
        self.more = nn.Sequential(nn.BatchNorm1d(4), nn.RMSNorm(4), nn.ReLU())
        self.position_bias_table = nn.Parameter(torch.zeros(3, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def test_biases_norms_and_scalars_do_not_decay_and_shared_weights_come_once() -> None:
    found = {s.name: s.weight_decay for s in parameter_settings(Net(), 0.1, 0.5)}
    decayed = {name for name, decay in found.items() if decay == 0.5}
    assert decayed == {"embedding.weight", *(f"blocks.{b}.{i}.weight" for b in (0, 1) for i in (0, 2))}
    assert {found[name] for name in found.keys() - decayed} == {0.0}
    assert found.keys() - decayed == {
        "scale",
        "position_bias_table",
        "between.weight",
        "between.bias",
        "more.0.weight",
        "more.0.bias",
        "more.1.weight",
        "head.bias",
        *(f"blocks.{b}.{i}.bias" for b in (0, 1) for i in (0, 2)),
    }
    assert {s.weight_decay for s in parameter_settings(Net(), 0.1, 0.5, decay_all=True)} == {0.5}


def test_layers_are_counted_from_the_input() -> None:
    numbers = layer_numbers(Net())
    by_hand = {
        **dict.fromkeys(["scale", "position_bias_table", "embedding.weight"], 0),
        **{f"blocks.{b}.{i}.{kind}": 1 + b for b in (0, 1) for i in (0, 2) for kind in ("weight", "bias")},
        **dict.fromkeys(["between.weight", "between.bias"], 2),
        **dict.fromkeys(["more.0.weight", "more.0.bias"], 3),
        **dict.fromkeys(["more.1.weight"], 4),
        **dict.fromkeys(["frozen.weight", "frozen.bias", "head.bias"], 5),
    }
    assert numbers == by_hand


def test_rates_fall_towards_the_input() -> None:
    rates = {s.name: s.lr for s in parameter_settings(Net(), 1.0, layer_decay=0.5)}
    assert rates["head.bias"] == 1.0
    assert rates["more.1.weight"] == 0.5
    assert rates["blocks.1.0.weight"] == 0.125
    assert rates["embedding.weight"] == 0.03125
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))  # nothing before or after: 0 and 1
    assert [s.lr for s in parameter_settings(net, 1.0, layer_decay=0.1)] == pytest.approx([0.1, 0.1, 1.0, 1.0])


def test_named_layers_take_the_longest_prefix() -> None:
    numbers = layer_numbers(Net(), ["embedding", "blocks", "blocks.1.2"])
    assert numbers["blocks.1.0.weight"] == 1
    assert numbers["blocks.1.2.weight"] == 2
    assert numbers["head.bias"] == 3
    assert numbers["embedding.weight"] == 0


def test_groups_hold_each_trainable_parameter_once_under_a_name_of_its_own() -> None:
    net = Net()
    groups = parameter_groups(parameter_settings(net, 1.0, 0.1, layer_decay=0.5))
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted({id(p) for p in net.parameters() if p.requires_grad})
    assert len({group["name"] for group in groups}) == len(groups)
    assert groups[0]["name"] == "layer_0_no_decay"
    (only,) = parameter_groups(parameter_settings(net, 1.0, 0.0))
    assert "name" not in only


def test_bad_input_names_the_way_out() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"cannot be told.*layers=\['stem'"):
        parameter_settings(plain, 1.0, layer_decay=0.5)
    with pytest.raises(ValueError, match=r"no layer 'block.0'. Did you mean 'blocks.0'"):
        layer_numbers(Net(), ["block.0"])
    with pytest.raises(ValueError, match=r"no effect without a layer_decay"):
        parameter_settings(plain, 1.0, layers=["weight"])
    with pytest.raises(ValueError, match="layer_decay=0 must be above 0 and at most 1"):
        parameter_settings(plain, 1.0, layer_decay=0)
    with pytest.raises(ValueError, match=r"none of its 2 parameters requires a gradient"):
        parameter_settings(nn.Linear(2, 2).requires_grad_(False), 1.0)
    with pytest.raises(ValueError, match="weight has no shape yet"):
        parameter_settings(nn.LazyLinear(2), 1.0)
