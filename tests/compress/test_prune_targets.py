"""Which weights are pruned, by name, and what is said where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_speedkit.compress.prune_targets import prunable_weights


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.block = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "fc": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_of_computing_layers_and_shared_ones_once() -> None:
    names = ["block.attention.in_proj_weight", "block.attention.out_proj.weight", "block.fc.weight"]
    assert list(prunable_weights(_Tied())) == ["embedding.weight", *names]
    untied = _Tied()
    untied.head.weight = nn.Parameter(torch.ones(9, 4))
    assert list(prunable_weights(untied)) == [*names, "head.weight"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.LSTM(3, 4), ["weight_ih_l0", "weight_hh_l0"]),
        (nn.GRUCell(3, 4), ["weight_ih", "weight_hh"]),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ConvTranspose1d(2, 2, 1)), ["0.weight", "2.weight"]),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2)), ["1.weight"]),
    ],
)
def test_layers(model: nn.Module, names: list[str]) -> None:
    assert list(prunable_weights(model)) == names


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["head"], ["block.attention.in_proj_weight", "block.attention.out_proj.weight", "block.fc.weight"]),
        (["embedding.weight", "block.fc"], ["block.attention.in_proj_weight", "block.attention.out_proj.weight"]),
        (["block"], ["embedding.weight"]),
        (["*.attention", "h*"], ["block.fc.weight"]),
    ],
)
def test_skip_names_layers_modules_and_parameters(skip: list[str], left: list[str]) -> None:
    assert list(prunable_weights(_Tied(), skip)) == left


def test_frozen_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(prunable_weights(model)) == ["1.weight"]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="0 are in skip and 2 are frozen"):
        prunable_weights(model)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"skip='blok' matches no layer.*Did you mean 'block.fc'\? There are: "):
        prunable_weights(_Tied(), ["blok"])
    with pytest.raises(ValueError, match="skip='norm' matches no layer that could be pruned"):
        prunable_weights(_Tied(), ["norm"])
    with pytest.raises(ValueError, match="nothing to prune in LayerNorm"):
        prunable_weights(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="are computed from others"):
        prunable_weights(parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="Run the model once"):
        prunable_weights(nn.Sequential(nn.LazyLinear(3)))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"multiples of 4.*: '0.weight' \(3\), '2.weight' \(6\). Name their layers"):
        prunable_weights(model, pattern="2:4")
    assert list(prunable_weights(model, ["0", "2"], "2:4")) == ["1.weight"]


def test_names_are_those_without_compile() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))  # type: ignore[arg-type]
    assert [name for name, _ in model.named_parameters()] == ["0._orig_mod.weight", "0._orig_mod.bias"]
    assert list(prunable_weights(model)) == ["0.weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_plain_module_says_so() -> None:
    with pytest.raises(TypeError, match=r"is a torch.nn.Module, got 'net'"):
        prunable_weights("net")  # type: ignore[arg-type]
    script: Any = torch.jit.script
    with pytest.raises(ValueError, match=r"prune before torch.jit.script"):
        prunable_weights(script(nn.Linear(2, 2)))
