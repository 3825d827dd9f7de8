"""The benchmark's own numbers: what each policy saves against the plain run, and that nothing differs from it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.activation_checkpointing import measure

_SIZE: dict[str, Any] = {"steps": 2, "depth": 2, "width": 32}


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    return measure(**_SIZE)


def _exact(told: dict[str, float]) -> bool:
    return told["differing_gradients"] == told["differing_buffers"] == 0


def test_the_policies_save_memory_in_their_order_and_change_nothing(plain: dict[str, float]) -> None:
    full = measure(**_SIZE, options={})
    selective = measure(**_SIZE, options={"policy": "selective"})
    half = measure(**_SIZE, options={"every": 2})
    assert all(_exact(told) for told in (plain, full, selective, half))
    assert full["saved_bytes"] < selective["saved_bytes"] < plain["saved_bytes"]
    assert full["saved_bytes"] < half["saved_bytes"] < plain["saved_bytes"]


def test_torch_s_contexts_are_really_used_and_put_back() -> None:
    from lightning_speedkit.memory import recomputation
    from lightning_speedkit.memory.checkpoint_policy_kept import KeptOutputs

    by_torch = measure(**_SIZE, options={"policy": "selective"}, by_torch=True, attention_dropout=False)
    ours = measure(**_SIZE, options={"policy": "selective"}, attention_dropout=False)
    assert _exact(ours)
    assert by_torch["differing_gradients"] == 0
    assert by_torch["saved_bytes"] != ours["saved_bytes"]  # torch keeps no bits of what dropout drew
    assert recomputation.KeptOutputs is KeptOutputs
