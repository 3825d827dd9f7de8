"""Which layers are given to torch's sparse form; no GPU is at hand, so what converts is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress import prune_semi_structured
from lightning_speedkit.compress.prune import prune_weights
from lightning_speedkit.compress.prune_semi_structured import runs_semi_structured, to_semi_structured


def test_layers_without_the_pattern_or_the_device_are_named_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 2))
    prune_weights(model, 0.5, pattern="2:4", skip=["2", "3"])
    told = to_semi_structured(model)
    assert told == {
        "0": "its weights are on cpu, which has no sparse tensor cores",
        "2": "its weights do not have the 2:4 pattern",
        "3": "its weights do not have the 2:4 pattern",
    }


def test_weights_are_converted_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(weight: Tensor) -> Tensor:
        if weight.shape[0] < 8:
            raise RuntimeError("both dimensions must be larger\nand more")
        return weight * 2

    monkeypatch.setattr(prune_semi_structured, "runs_semi_structured", lambda device: True)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", convert)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    prune_weights(model, 0.5, pattern="2:4")
    before = model[0].weight.detach().clone()
    assert to_semi_structured(model) == {"0": "converted", "1": "both dimensions must be larger"}
    assert torch.equal(model[0].weight, before * 2)
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize(("capability", "answer"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_capability_decides(capability: tuple[int, int], answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(_: Any) -> tuple[int, int]:
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", of)
    assert runs_semi_structured(torch.device("cuda")) is answer
    assert not runs_semi_structured(torch.device("cpu"))
