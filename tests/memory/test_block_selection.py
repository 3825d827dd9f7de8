"""Which modules a selection means, on models whose blocks are known by reading them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.block_selection import checked_selection, find_blocks, select_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class OwnLayer(nn.Module):
    """A single layer of somebody's own, with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class OwnNorm(nn.Module):
    """A single layer of somebody's own, without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class OwnLinear(nn.Linear):
    pass


class Calls(nn.ModuleList):
    """A list that is also called, as DenseNet's blocks are."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _stage(n: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(n)))


def _tree(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


_SHARED = Block()

AUTO: dict[str, tuple[nn.Module, tuple[str, ...]]] = {
    "a transformer": (
        _tree(embed=nn.Embedding(5, 4), layers=nn.ModuleList([Block(), Block(), Block()]), head=nn.Linear(4, 5)),
        ("layers.0", "layers.1", "layers.2"),
    ),
    "torch's own encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False),
        ("layers.0", "layers.1"),
    ),
    "stages of blocks": (
        _tree(stem=nn.Conv2d(3, 4, 3), layer1=_stage(), layer2=_stage()),
        ("layer1.0", "layer1.1", "layer2.0", "layer2.1"),
    ),
    "stages in a container": (nn.Sequential(_stage(), _stage()), ("0.0", "0.1", "1.0", "1.1")),
    "plain Sequentials as blocks": (nn.Sequential(_pair(), _pair(), nn.Linear(4, 1)), ("0", "1")),
    "a dict of blocks": (_tree(towers=nn.ModuleDict({"a": Block(), "b": Block()})), ("towers.a", "towers.b")),
    "blocks in blocks": (_tree(outer=nn.ModuleList([_tree(inner=_stage()) for _ in range(2)])), ("outer.0", "outer.1")),
    "one of a kind beside a pair": (
        nn.Sequential(_tree(inner=_stage()), Block(), Block()),
        ("0.inner.0", "0.inner.1", "1", "2"),
    ),
    "lists that are called": (nn.Sequential(Calls([_pair()]), Calls([_pair()])), ("0", "1")),
    "lists that are not": (
        nn.Sequential(nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])),
        ("0.0", "0.1", "1.0", "1.1"),
    ),
    "compiled blocks": (
        _tree(layers=nn.ModuleList([torch.compile(Block()), torch.compile(Block())])),
        ("layers.0._orig_mod", "layers.1._orig_mod"),
    ),
    "one of two blocks compiled": (nn.Sequential(Block(), torch.compile(Block())), ("0", "1._orig_mod")),
    "compiled stages": (
        nn.Sequential(torch.compile(_stage()), torch.compile(_stage())),
        ("0._orig_mod.0", "0._orig_mod.1", "1._orig_mod.0", "1._orig_mod.1"),
    ),
    "a compiled model": (torch.compile(_tree(layers=_stage())), ("_orig_mod.layers.0", "_orig_mod.layers.1")),
    "own layers with a matrix": (nn.Sequential(OwnLayer(), OwnLayer()), ("0", "1")),
}

NOTHING: dict[str, nn.Module] = {
    "layers only": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "a convolution, twice": nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
    "subclasses of layers": nn.Sequential(OwnLinear(4, 4), OwnLinear(4, 4)),
    "recurrent layers": nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)]),
    "norms of one's own": nn.Sequential(OwnNorm(), OwnNorm()),
    "blocks without parameters": nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())),
    "one block": nn.Sequential(Block()),
    "one block twice": nn.ModuleList([_SHARED, _SHARED]),
    "compiled layers": nn.Sequential(torch.compile(nn.Linear(4, 4)), torch.compile(nn.Linear(4, 4))),
    "pairs outside containers": _tree(first=Block(), second=Block()),
    "no modules": nn.Module(),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto_finds_the_repeated_blocks(case: str) -> None:
    model, blocks = AUTO[case]
    assert find_blocks(model) == blocks
    assert select_modules(model, "auto") == blocks
    assert select_modules(model, ["auto"]) == blocks


@pytest.mark.parametrize("case", NOTHING)
def test_auto_that_finds_nothing_says_so(case: str) -> None:
    assert find_blocks(NOTHING[case]) == ()
    with pytest.raises(ValueError, match="auto' found no repeated blocks"):
        select_modules(NOTHING[case], "auto")


def test_what_auto_says_names_what_is_there() -> None:
    with pytest.raises(ValueError, match=r"Block \(x2\)") as caught:
        select_modules(_tree(first=Block(), second=Block()), "auto")
    assert "'first', 'second'" in str(caught.value)


MODEL = _tree(
    encoder=_tree(layers=nn.ModuleList([Block(), Block()]), norm=nn.LayerNorm(4)),
    decoder=_tree(layers=nn.ModuleList([Block()]), norm=nn.LayerNorm(4)),
)


@pytest.mark.parametrize(
    ("selection", "paths"),
    [
        ("Block", ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0")),
        ("encoder.layers.1", ("encoder.layers.1",)),
        ("encoder.layers.*", ("encoder.layers.0", "encoder.layers.1")),
        ("*.layers.0", ("encoder.layers.0", "decoder.layers.0")),
        ("*coder.norm", ("encoder.norm", "decoder.norm")),
        (["LayerNorm", "decoder.layers.0"], ("encoder.norm", "decoder.layers.0", "decoder.norm")),
        (("encoder.layers.[01]", "Block"), ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0")),
        ("Linear", ("encoder.layers.0.mlp.0", "encoder.layers.1.mlp.0", "decoder.layers.0.mlp.0")),
    ],
)
def test_a_selection_by_name(selection: str | list[str], paths: tuple[str, ...]) -> None:
    assert select_modules(MODEL, selection) == paths


@pytest.mark.parametrize("selection", ["Block", "layers.*", "layers.*._orig_mod", ["layers.0", "layers.1"]])
def test_of_a_compiled_module_the_one_inside_is_meant(selection: str | list[str]) -> None:
    model = _tree(layers=nn.ModuleList([torch.compile(Block()), torch.compile(Block())]), head=nn.Linear(4, 4))
    assert select_modules(model, selection) == ("layers.0._orig_mod", "layers.1._orig_mod")


@pytest.mark.parametrize(
    ("selection", "paths"),
    [
        ("last", ("layers.1",)),
        ("layers.1", ("layers.1",)),
        (["last", "layers.*"], ("layers.0", "layers.1")),
        ("tail.mlp.0", ("layers.0.mlp.0",)),
        ("Block", ("layers.0", "layers.1")),
    ],
)
def test_every_path_of_a_shared_module_means_it(selection: str | list[str], paths: tuple[str, ...]) -> None:
    model = _tree(layers=nn.ModuleList([Block(), Block()]))
    model.add_module("last", model.layers[1])
    model.add_module("tail", model.layers[0])
    assert select_modules(model, selection) == paths


def test_a_star_stands_for_one_name() -> None:
    with pytest.raises(ValueError, match="no path 'enc\\*0'"):
        select_modules(MODEL, "enc*0")  # not encoder.layers.0


@pytest.mark.parametrize(
    ("wrong", "near"), [("Blok", "Block (x3)"), ("block", "Block (x3)"), ("encoder.layer.1", "'encoder.layers.1'")]
)
def test_a_name_that_means_nothing_is_an_error_with_the_nearest_first(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match="no class and no path") as caught:
        select_modules(MODEL, ["Block", wrong])
    classes, _, paths = str(caught.value).partition("Classes in it: ")[2].partition(" Paths, for example: ")
    assert classes.startswith(near) or paths.startswith(near)


def test_a_list_of_modules_is_not_a_module_to_run() -> None:
    with pytest.raises(ValueError, match=r"never called.*'encoder\.layers\.\*'"):
        select_modules(MODEL, "encoder.layers")


def test_the_whole_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is the whole model"):
        select_modules(Block(), "Block")


def test_a_class_that_is_the_model_and_also_inside_it_means_those_inside() -> None:
    assert select_modules(nn.Sequential(OrderedDict(a=_pair(), b=_pair())), "Sequential") == ("a", "b")


@pytest.mark.parametrize("wrong", [3, None, [1], {"Block": 1}, nn.Linear])
def test_a_selection_of_a_wrong_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match="modules is a name or a list of names"):
        checked_selection(wrong)


@pytest.mark.parametrize("wrong", [[], "", ["Block", " "]])
def test_an_empty_selection(wrong: Any) -> None:
    with pytest.raises(ValueError, match="names nothing"):
        checked_selection(wrong)


def test_auto_among_names() -> None:
    with pytest.raises(ValueError, match="mixes 'auto'"):
        checked_selection(["auto", "Block"])
