from __future__ import annotations

import pytest
from torch import nn

from lightning_speedkit.compress.shrink_heads import Attention as Layout
from lightning_speedkit.compress.shrink_heads import attention_layouts
from lightning_speedkit.compress.shrink_sizes import cut
from tests.compress.shrink_models import Attention, Transformer


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_known_by_its_layers(fused: bool) -> None:
    inputs = ("qkv",) if fused else ("q_proj", "k_proj", "v_proj")
    assert attention_layouts(Transformer(fused)) == {"attention": Layout(inputs, "proj", "num_heads", 4, 4)}


def test_rows_of_a_head_are_its_query_key_and_value() -> None:
    layout = Layout(("qkv",), "proj", "num_heads", heads=4, size=2)
    assert list(layout.rows(1)) == [2, 3, 10, 11, 18, 19]  # blocks of 4 * 2 rows
    assert list(layout.columns(1)) == [2, 3]
    assert list(Layout(("q", "k", "v"), "proj", "num_heads", 4, 2).rows(3)) == [6, 7]


def test_timms_attention_and_its_numbers() -> None:
    layers = pytest.importorskip("timm.layers", reason="timm is not installed")
    module = layers.Attention(12, num_heads=3)
    assert attention_layouts(module) == {"": Layout(("qkv",), "proj", "num_heads", 3, 4)}
    rows = [row for block in (0, 1, 2) for row in range(block * 12, block * 12 + 4)]
    cut(module, {"qkv.weight": {0: rows}, "proj.weight": {1: [0, 1, 2, 3]}})
    assert (module.num_heads, module.head_dim) == (1, 4)


def test_others_are_left_alone() -> None:
    odd = Attention()
    odd.num_heads = 3  # which 16 columns cannot have
    assert attention_layouts(nn.ModuleList([odd, nn.MultiheadAttention(8, 2), nn.Linear(3, 3)])) == {}
