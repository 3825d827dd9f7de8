"""The optimizer state of all stages as one, against the optimizer of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_speedkit.parallel.pipeline_state import (
    gather,
    gather_optimizer_state,
    gather_tensors,
    optimizer_state_of_stage,
)
from tests.two_ranks import on_two_ranks


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 1))


def _groups(layers: list[nn.Module]) -> list[dict[str, Any]]:
    parts = [p for layer in layers for p in layer.parameters()]
    return [
        {"params": [p for p in parts if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parts if p.ndim == 1], "weight_decay": 0.0},
    ]


def _stepped(layers: list[nn.Module]) -> torch.optim.Optimizer:
    """Each parameter's gradient is its own value, so that stages and the whole model step alike."""
    optimizer = torch.optim.AdamW(_groups(layers), lr=0.1)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def _on_a_stage() -> Any:
    dist.init_process_group("gloo")
    try:
        chain, group, rank = _chain(), dist.group.WORLD, dist.get_rank()
        places = {parameter: place for place, parameter in enumerate(chain.parameters())}
        mine: list[nn.Module] = list(chain[2 * rank : 2 * rank + 2])
        optimizer = _stepped(mine)
        full = gather_optimizer_state(optimizer, places, group)
        again = torch.optim.AdamW(_groups(mine), lr=0.5)
        again.load_state_dict(optimizer_state_of_stage(full, again, places, group))
        alike = [
            torch.equal(again.state[p][name], optimizer.state[p][name])
            for layer in mine
            for p in layer.parameters()
            for name in ("exp_avg", "exp_avg_sq", "step")
        ]
        refused = ""
        try:
            optimizer_state_of_stage(full, torch.optim.AdamW(mine[0].parameters()), places, group)
        except (MisconfigurationException, ValueError) as error:
            refused = str(error)
        names = [f"{i}.weight" for i in range(4)]
        tensors = gather_tensors({f"{2 * rank + i}.weight": layer.weight for i, layer in enumerate(mine)}, names, group)
        return full, again.param_groups[0]["lr"], alike, refused, list(tensors), gather(rank, group)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def stages() -> Any:
    return on_two_ranks(_on_a_stage, timeout=60.0)


def test_it_is_the_state_that_the_optimizer_of_the_whole_model_has(stages: Any) -> None:
    expected = _stepped(list(_chain())).state_dict()
    for full, *_ in stages:
        assert full["param_groups"] == expected["param_groups"]
        assert full["state"].keys() == expected["state"].keys()
        for number, kept in expected["state"].items():
            for name, value in kept.items():
                found: Tensor = full["state"][number][name]
                torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_a_stage_gets_its_part_back(stages: Any) -> None:
    for _, rate, alike, *_ in stages:
        assert rate == 0.1
        assert len(alike) == 12
        assert all(alike)


def test_other_groups_are_refused_and_names_keep_their_order(stages: Any) -> None:
    for _, _, _, refused, names, ranks in stages:
        assert "other groups of parameters" in refused
        assert names == ["0.weight", "1.weight", "2.weight", "3.weight"]
        assert ranks == [0, 1]
