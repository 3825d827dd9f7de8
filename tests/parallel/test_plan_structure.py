"""Which blocks can be cut is found by structure; what only looks like one is left whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.parallel.plan_structure import can_be_cut, find_tensor_plan
from tests.parallel.plan_models import Attention


class Gated(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Normed(Gated):
    """Looks at all hidden numbers together, so no rank could do it alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gate(x) * self.up(x)
        return self.down(hidden / hidden.norm(dim=-1, keepdim=True))  # type: ignore[no-any-return]


class Also(Gated):
    """Gives the hidden numbers away too."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gate(x) * self.up(x)
        return self.down(hidden) + hidden[..., :1]  # type: ignore[no-any-return]


class Twice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x)) + self.down(self.up(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """Query, key and value in one layer: a share of its rows is not a share of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


FOUND: dict[str, tuple[Any, dict[str, str]]] = {
    "gated": (Gated, {"gate": "column", "up": "column", "down": "row"}),
    "attention": (
        Attention,
        {"query": "column", "key": "column", "value": "column", "out": "row", "heads": "divide"},
    ),
    "chain": (
        lambda: nn.Sequential(*(nn.Linear(4, 4), nn.ReLU()) * 2, nn.Linear(4, 4)),
        {},
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
        {"linear1": "column", "linear2": "row"},
    ),
    "norm": (Normed, {}),
    "given away": (Also, {}),
    "twice": (Twice, {}),
    "fused": (Fused, {}),
    "odd": (lambda: Gated(6, 7), {}),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)), {}),
    "padded": (lambda: nn.Embedding(5, 4, padding_idx=0), {"": "embedding"}),
    "renormed": (lambda: nn.Embedding(5, 4, max_norm=1.0), {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_cut(name: str) -> None:
    make, expected = FOUND[name]
    if name == "chain":
        block = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.ReLU())))
        expected = {"0": "column", "2": "row", "4": "column", "6": "row"}
    else:
        block = make()
    assert find_tensor_plan(block, 2)[0] == expected


def test_it_says_why_a_block_is_left_whole() -> None:
    block, tied = Gated(), nn.Linear(8, 6, bias=False)
    tied.weight = block.down.weight
    net = nn.ModuleList([Gated(6, 7), nn.Embedding(5, 3), block, tied])
    plan, left = find_tensor_plan(net, 2)
    assert plan == {}
    assert left == {
        "0.down": "its size 7 is not divided by 2",
        "1": "its size 3 is not divided by 2",
        "2.down": "its weights are tied",
    }


def test_nothing_of_the_model_or_the_random_numbers_changes() -> None:
    block = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2))
    before = {name: value.clone() for name, value in block.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert can_be_cut(block, ["0"], "2", 2) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert block.training
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


def test_what_is_on_meta_cannot_be_tried() -> None:
    with torch.device("meta"):
        assert can_be_cut(Gated(), ["gate", "up"], "down", 2) is None
