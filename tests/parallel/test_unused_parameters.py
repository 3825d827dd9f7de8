"""The names in messages about unused parameters."""

from __future__ import annotations

import torch
from torch import nn

from lightning_speedkit.parallel.unused_parameters import name_unused, unused_message, without_gradient


def test_parameters_without_a_gradient() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].requires_grad_(False)
    module[0](torch.ones(1, 2)).sum().backward()
    assert without_gradient(module) == ["1.weight", "1.bias"]
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    assert without_gradient(module) == ["1.weight"]


def test_torch_counts_only_what_is_trained() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].bias.requires_grad_(False)
    error = "Expected ... Parameter indices which did not receive grad for rank 1: 0 2\n In addition, you can set ..."
    assert name_unused(module, error) == ["0.weight", "1.bias"]
    assert name_unused(module, "another error") == []
    assert name_unused(nn.Linear(1, 1), "Parameter indices which did not receive grad for rank 0: 7") == []


def test_many_names_are_cut_short() -> None:
    message = unused_message([f"p{number}" for number in range(12)])
    assert "p0, p1, " in message
    assert "p9 and 2 more. DDP" in message
    assert "p10" not in message
