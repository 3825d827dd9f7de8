"""Whole values taken apart, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_speedkit.parallel.plan_state import (
    check_names,
    copy_weights,
    local_part,
    optimizer_state,
    optimizer_state_here,
    whole_state,
)
from tests.two_ranks import on_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5))


def _parts() -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole, found = torch.arange(35.0).reshape(5, 7), {}
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            like = distribute_tensor(whole, mesh, [first, second])
            found[f"{first}{second}"] = torch.equal(local_part(whole, like), like.to_local())
    net, other = _net(), _net()
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = torch.equal(local_part(before[name], parameter), parameter.to_local())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    copy_weights(net, before, strict=True)
    state = whole_state(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    full = [optimizer_state(optimizer, whole=True)]
    dist.broadcast_object_list(full)
    again = optimizer_state_here(full[0], optimizer)
    found["optimizer"] = all(
        torch.equal(value.to_local(), optimizer.state[p]["exp_avg"].to_local())
        for p, value in ((p, again["state"][i]["exp_avg"]) for i, p in enumerate(net.parameters()))
    )
    dist.destroy_process_group()
    return {"equal": found, "state": state, "full": full[0]}


def test_parts_on_four_ranks() -> None:
    for rank, found in enumerate(on_ranks(4, _parts, timeout=60.0)):
        assert all(found["equal"].values()), found["equal"]
        if rank:
            assert found["state"] == {}
            continue
        expected = _net().state_dict()
        assert list(found["state"]) == list(expected)
        assert all(torch.equal(value, expected[name]) for name, value in found["state"].items())
        assert [tuple(s["exp_avg"].shape) for s in found["full"]["state"].values()] == [
            tuple(p.shape) for p in _net().parameters()
        ]


def test_groups_have_to_be_those_of_the_checkpoint() -> None:
    state = torch.optim.SGD(_net().parameters()).state_dict()
    assert optimizer_state_here(state, torch.optim.SGD(_net().parameters()))["state"] == {}
    groups: list[dict[str, list[Tensor]]] = [{"params": list(layer.parameters())} for layer in (_net()[0], _net()[2])]
    with pytest.raises(MisconfigurationException, match=r"groups of \[6\] parameters, and .* gives groups of \[2, 2\]"):
        optimizer_state_here(state, torch.optim.SGD(groups))


def test_names_and_shapes_have_to_fit() -> None:
    own = {"weight": torch.ones(2), "bias": torch.ones(1)}
    check_names("It", {"weight": torch.ones(2)}, own, strict=False)
    with pytest.raises(MisconfigurationException, match=r"lacks \['bias'\] and has \[\].*strict_loading=False"):
        check_names("It", {"weight": torch.ones(2)}, own, strict=True)
    with pytest.raises(
        MisconfigurationException, match=r"'weight' in the shape \(3,\), and in the model it has \(2,\)"
    ):
        check_names("It", {"weight": torch.ones(3)}, own, strict=False)
