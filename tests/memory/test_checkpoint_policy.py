"""Names of policies and of operations, and what is wrong with them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_speedkit.memory.checkpoint_policy import Offload, Recompute, checked_policy

ATEN = torch.ops.aten


def test_full_keeps_nothing() -> None:
    assert checked_policy() == checked_policy("full") == Recompute(frozenset())


def test_selective_keeps_the_expensive_and_not_the_cheap() -> None:
    policy = checked_policy("selective")
    assert isinstance(policy, Recompute)
    for expensive in (ATEN.mm, ATEN.addmm, ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN.convolution):
        assert expensive.default in policy.keep
    for cheap in (ATEN.native_layer_norm, ATEN.gelu, ATEN.native_dropout, ATEN._softmax, ATEN.bmm):
        assert cheap.default not in policy.keep
    assert policy == checked_policy("selective", ["matmul", "attention", "convolution"])


@pytest.mark.parametrize("keep", [["matmul", "aten._softmax"], ("aten._softmax", "matmul")])
def test_classes_and_single_operations_together(keep: Any) -> None:
    policy = checked_policy("selective", keep)
    assert isinstance(policy, Recompute)
    assert ATEN._softmax.default in policy.keep
    assert ATEN._softmax.out not in policy.keep  # it writes to what it is given
    assert ATEN.mm.default in policy.keep


def test_offload_and_its_threshold() -> None:
    assert checked_policy("offload") == Offload(1 << 20)
    assert checked_policy("offload", min_bytes=0) == Offload(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "some"}, "policy='some' is not one of 'full', 'selective', 'offload'"),
        ({"policy": None}, "policy=None is not one of"),
        ({"keep": ["matmul"]}, "option of policy='selective', got policy='full'"),
        ({"policy": "offload", "keep": []}, "option of policy='selective', got policy='offload'"),
        ({"min_bytes": 3}, "option of policy='offload', got policy='full'"),
        ({"policy": "offload", "min_bytes": -1}, "min_bytes=-1 must be 0 or more"),
        ({"policy": "selective", "keep": []}, "keep=[] keeps nothing"),
        ({"policy": "selective", "keep": ["matmull"]}, "Did you mean 'matmul'?"),
        ({"policy": "selective", "keep": ["aten.nothing"]}, "'aten.nothing' is no class and no operation"),
        ({"policy": "selective", "keep": ["nothing.mm"]}, "'nothing.mm' is no class and no operation"),
        ({"policy": "selective", "keep": [""]}, "'' is no class and no operation"),
        ({"policy": "selective", "keep": ["aten.add_"]}, "'aten.add_' is no class and no operation"),
        ({"policy": "selective", "keep": ["aten.view"]}, "'aten.view' is no class and no operation"),
        ({"policy": "selective", "keep": ["aten._to_copy"]}, "autocast skips some of them"),
        ({"policy": "selective", "keep": ["aten.dropout"]}, "is made of other operations"),
        ({"policy": "selective", "keep": ["aten.scaled_dot_product_attention"]}, "is made of other operations"),
    ],
)
def test_a_wrong_value_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_policy(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "selective", "keep": "matmul"},
        {"policy": "selective", "keep": [3]},
        {"policy": "offload", "min_bytes": "1MB"},
        {"policy": "offload", "min_bytes": True},
    ],
)
def test_a_wrong_type_is_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"keep is a list|min_bytes is a whole number"):
        checked_policy(**arguments)
