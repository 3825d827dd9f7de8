"""Which modules become a unit."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.parallel.plan_units import check_parameters, find_units, named_uses, shared_names
from tests.parallel.plan_models import Net


def test_by_class_and_by_size() -> None:
    # a block has 6 * 8 + 8 + 8 * 6 + 6 = 110 parameters, its layers 56 and 54
    assert find_units(Net(), ["Block"], 1) == (["blocks.0", "blocks.1"], {})
    assert find_units(Net(), None, 100) == (["blocks.0", "blocks.1"], {})
    assert find_units(Net(), None, 55) == (["blocks.0.up", "blocks.1.up"], {})
    assert find_units(Net(), None, 1000) == ([], {})


def test_inner_units_come_first() -> None:
    assert find_units(Net(), ["Block", "Linear"], 1)[0] == [
        *("inlet", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "outlet", "head"),
    ]


def test_tied_weights_are_left_to_a_module_around_both() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    net[0][1].weight = net[0][0].weight  # type: ignore[index]
    names, left = find_units(net, ["Linear", "Sequential"], 1)
    assert names == ["0", "1"]
    assert left == {"0.0": "its weights are tied to '0.1.weight'", "0.1": "its weights are tied to '0.0.weight'"}
    assert [name for name, _ in named_uses(net)].count("0.1.weight") == 1
    assert list(shared_names(net).values()) == [["0.0.weight", "0.1.weight"]]


def test_parts_of_attention_are_no_units() -> None:
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 64), nn.MultiheadAttention(8, 2))
    assert find_units(net, None, 60)[0] == ["0", "1"]


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"'Blok', and no module .* Did you mean 'Block'. There are Blo"
    ):
        find_units(Net(), ["Blok"], 1)


def test_parameters_that_cannot_be_sharded() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    check_parameters(net)
    net.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(MisconfigurationException, match=r"\['scale'\] have no dimension"):
        check_parameters(net)
    with pytest.raises(MisconfigurationException, match=r"\['0.weight', '0.bias'\] have no size yet"):
        check_parameters(nn.Sequential(nn.LazyLinear(3)))
