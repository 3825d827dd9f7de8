"""Names match what they name and everything inside it, in every technique alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.conversion import quantize_model
from lightning_speedkit.compress.convert import convert_model
from lightning_speedkit.compress.module_names import check_names, matches, plain_name
from lightning_speedkit.compress.prune_targets import prunable_weights
from lightning_speedkit.compress.quantize_aware_layers import FakeQuantization


@pytest.mark.parametrize("names", ["head", {"head"}, [1], {"head": 1}, 3])
def test_names_are_a_list_of_strings(names: Any) -> None:
    with pytest.raises(TypeError, match="skip must be a list of names, got "):
        check_names("skip", names)
    given = ["head"]
    taken = check_names("skip", given)
    assert taken == given
    assert taken is not given


@pytest.mark.parametrize(
    ("name", "pattern", "found"),
    [
        ("a.b.c", "a", True),
        ("a.b.c", "a.b", True),
        ("a.b.c", "a.b.c", True),
        ("a.b.c", "b", False),
        ("ab.c", "a", False),
        ("a.b.c", "a.?", True),
        ("a.10.c", "a.?", False),
        ("a.b.c", "*.b", True),
        ("a.b.c", "*.c", True),
        ("a.b.c", "A", False),
        ("a[0].b", "a[0]", True),  # a name, although it reads as a pattern
        ("a._orig_mod.b", "a.b", True),
        ("", "a", False),
        ("", "*", True),
    ],
)
def test_a_name_matches_what_lies_inside(name: str, pattern: str, found: bool) -> None:
    assert matches(name, ["nothing", pattern]) is found


def test_names_are_those_without_compile() -> None:
    assert [plain_name(name) for name in ("a.b", "_orig_mod.a", "a._orig_mod.b.weight", "a._orig_mod")] == [
        "a.b", "a", "a.b.weight", "a",
    ]  # fmt: skip


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = {"mlp": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "out": nn.Linear(8, 8)}
        self.blocks, self.head = nn.ModuleList([nn.ModuleDict(block)]), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["out"](block["mlp"](x))
        scores: torch.Tensor = self.head(x)
        return scores


@pytest.mark.parametrize("backend", ["torch-ao-dynamic", "onnxruntime-dynamic", "torchao-weight-int8"])
@pytest.mark.filterwarnings("ignore")
def test_a_wildcard_for_a_module_keeps_the_layers_inside_it_in_float(backend: str) -> None:
    made = convert_model(_Blocks(), [torch.randn(4, 8)], backend=backend, skip=["blocks.?.mlp"])
    assert made.quantized == ("blocks.0.out", "head")
    assert made.skipped == {"blocks.0.mlp.0": "named in skip"}


def test_the_same_wildcard_means_the_same_to_other_techniques() -> None:
    left = ["blocks.0.out", "head"]
    assert list(FakeQuantization(_Blocks(), skip=["blocks.?.mlp"]).layers) == left
    assert list(prunable_weights(_Blocks(), ["blocks.?.mlp"])) == [f"{name}.weight" for name in left]


@pytest.mark.parametrize("convert", [convert_model, quantize_model])
def test_one_name_that_is_no_list_is_refused_and_not_passed_over(convert: Any) -> None:
    with pytest.raises(TypeError, match=r"skip must be a list of names, got the string 'head'; write \['head'\]"):
        convert(_Blocks(), [torch.randn(4, 8)], skip="head")
    with pytest.raises(TypeError, match="skip must be a list of names"):
        FakeQuantization(_Blocks(), skip="head")
