"""Finds which linear and embedding layers can be cut across ranks, and proves it on random numbers.

A block can be cut if one linear layer (the row) takes what others (the columns) gave: each rank then has its share of
the columns' outputs and of the row's inputs, and only the row's output is summed over the ranks. Multilayer perceptrons
with and without gates, and attention with separate projections, are of this kind. Whether a block is one shows when it
runs with the share of one rank: the row has to get the same share of its input, and the block to give the same.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_speedkit.parallel.plan_tensor import cut_size, numbers_of
from lightning_speedkit.parallel.plan_units import shared_names

__all__ = ["can_be_cut", "find_tensor_plan"]


def find_tensor_plan(module: nn.Module, ranks: int) -> tuple[dict[str, str], dict[str, str]]:
    """Layers to cut, by name, and why others that looked alike are left whole.

    Args:
        module: The whole model, with its weights.
        ranks: How many share a layer.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    >>> find_tensor_plan(net, 2)
    ({'1': 'column', '3': 'row', '0': 'embedding'}, {})
    """
    tied = {name.rpartition(".")[0] for names in shared_names(module).values() for name in names}
    known: dict[Any, list[str] | None] = {}
    plan: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, block in module.named_modules():
        prefix = f"{path}." if path else ""
        if type(block) is nn.Embedding:
            reason = _why_whole(block, ranks) if path not in tied else "its weights are tied"
            if reason:
                left[path] = reason
            else:
                plan[path] = "embedding"
        for columns, row, piece in _candidates(block):
            names = [prefix + name for name in (*columns, row)]
            if any(name in plan for name in names):
                continue
            if any(name in tied for name in names):
                left[names[-1]] = "its weights are tied"
                continue
            if (size := cut_size(piece.get_submodule(row), "row")) % ranks:
                left[names[-1]] = f"its size {size} is not divided by {ranks}"
                continue
            key = (type(piece), str(piece), tuple(numbers_of(piece).items()), columns, row)
            if key not in known:
                known[key] = can_be_cut(piece, columns, row, ranks)
            divided = known[key]
            if divided is not None:
                plan.update(dict.fromkeys(names[:-1], "column") | {names[-1]: "row"})
                plan.update({prefix + name: "divide" for name in divided})
                left.pop(names[-1], None)
    return plan, left


def _why_whole(layer: nn.Embedding, ranks: int) -> str:
    if layer.embedding_dim % ranks:
        return f"its size {layer.embedding_dim} is not divided by {ranks}"
    return "it has max_norm or sparse gradients" if layer.max_norm is not None or layer.sparse else ""


def _candidates(block: nn.Module) -> Iterator[tuple[tuple[str, ...], str, nn.Module]]:
    """Columns, row and what to run, of a module's own linear layers."""
    linear = {name: child for name, child in block.named_children() if type(child) is nn.Linear}
    names = list(linear)
    for end, row in enumerate(names):
        for start in range(end):
            columns = tuple(names[start:end])
            if any(linear[name].out_features != linear[row].in_features for name in columns):
                continue
            if not isinstance(block, nn.Sequential):
                yield columns, row, block
            elif len(columns) == 1:  # the part from one to the other
                children = list(block.named_children())
                order = [name for name, _ in children]
                piece = nn.Sequential()
                for name, child in children[order.index(columns[0]) : order.index(row) + 1]:
                    piece.add_module(name, child)
                yield columns, row, piece


def can_be_cut(block: nn.Module, columns: Sequence[str], row: str, ranks: int) -> list[str] | None:
    """Which numbers of the block have to be divided for it; none is an empty list, and ``None``: it cannot be cut.

    Args:
        block: Called with one tensor ``(batch, features)`` or ``(batch, length, features)``; it is not changed.
        columns: Linear layers whose outputs are shared out.
        row: The linear layer that takes them.
        ranks: How many share them.

    >>> block = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 3))
    >>> can_be_cut(block, ["0"], "2", 2) is None
    True
    """
    if any(tensor.is_meta for tensor in block.parameters()):
        return None
    numbers = [name for name, value in numbers_of(block).items() if value > 1 and value % ranks == 0]
    choices = itertools.chain.from_iterable(itertools.combinations(numbers, count) for count in (0, 1, 2))
    try:
        whole = copy.deepcopy(block).double().cpu().eval()
    except Exception:  # what cannot be copied cannot be tried
        return None
    features = cut_size(whole.get_submodule(columns[0]), "row")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, features, dtype=torch.float64, generator=generator) for shape in ((2, 3), (4,))]
    for divided in choices:
        for value in inputs:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():  # with gradients no layer takes a short cut
                try:
                    if all(_fits(whole, columns, row, divided, rank, ranks, value) for rank in range(ranks)):
                        return list(divided)
                except Exception:  # a block that does not run with a share cannot be cut
                    continue
    return None


class _Row(nn.Module):
    """Stands for the row: keeps what it got, and answers what the whole layer answered."""

    def __init__(self, answers: nn.Module | Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "answers", answers)
        self.got: list[Tensor] = []
        self.gave: list[Tensor] = []

    @override
    def forward(self, value: Tensor) -> Tensor:
        answers = self.__dict__["answers"]
        self.got.append(value)
        self.gave.append(answers(value) if isinstance(answers, nn.Module) else answers)
        return self.gave[-1]


def _fits(
    whole: nn.Module, columns: Sequence[str], row: str, divided: Sequence[str], rank: int, ranks: int, value: Tensor
) -> bool:
    block = copy.deepcopy(whole)
    full = _Row(block.get_submodule(row))
    block.set_submodule(row, full)
    expected = block(value)
    if len(full.got) != 1 or not isinstance(expected, Tensor):
        return False
    part = copy.deepcopy(whole)
    stub = _Row(full.gave[0])
    part.set_submodule(row, stub)
    for name in columns:
        part.set_submodule(name, _share(whole.get_submodule(name), rank, ranks))
    for name in divided:
        setattr(part, name, getattr(part, name) // ranks)
    found = part(value)
    share = full.got[0].chunk(ranks, -1)[rank]
    return (
        len(stub.got) == 1
        and stub.got[0].shape == share.shape
        and torch.allclose(stub.got[0], share, 1e-9, 1e-12)
        and found.shape == expected.shape
        and torch.allclose(found, expected, 1e-9, 1e-12)
    )


def _share(layer: nn.Module, rank: int, ranks: int) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight, layer.bias
    made = nn.Linear(weight.shape[1], weight.shape[0] // ranks, bias is not None, dtype=weight.dtype)
    made.weight.data = weight.data.chunk(ranks, 0)[rank]
    if bias is not None:
        made.bias.data = bias.data.chunk(ranks, 0)[rank]
    return made.train(layer.training)
