"""How many processes there are of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import init_device_mesh

from lightning_speedkit.parallel.plan_mesh import PlanMesh, plan_sizes
from tests.two_ranks import on_ranks


def test_sizes() -> None:
    assert plan_sizes("auto", 1, 1, 4) == (4, 1, 1)
    assert plan_sizes("auto", 2, 2, 8) == (4, 2, 2)
    assert plan_sizes(2, 2, 1, 4) == (2, 2, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("auto", 3, 1, 4), "tensor_parallel=3 does not divide the 4 processes"),
        ((3, 1, 1, 4), "data_parallel=3 and tensor_parallel=1 make 3 processes, and there are 4"),
        (("auto", 1, 3, 4), "replicas=3 does not divide the 4 data parallel ranks"),
    ],
)
def test_processes_that_do_not_divide(asked: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        plan_sizes(*asked)


def _meshes() -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for data, tensor, replicas in ((4, 1, 1), (2, 2, 1), (1, 4, 1), (4, 1, 2), (2, 2, 2)):
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data_parallel", "tensor_parallel"))
        made = PlanMesh.of(mesh, replicas)
        shards = (
            None if made.shards is None else [dist.get_process_group_ranks(g) for g in made.shards.get_all_groups()]
        )
        shared = None if made.tensor is None else dist.get_process_group_ranks(made.tensor.get_group())
        found.append((shards, shared, dist.get_process_group_ranks(made.data_group)))
    dist.destroy_process_group()
    return found


def test_who_shares_what() -> None:
    # of rank 1 of four
    assert on_ranks(4, _meshes, timeout=60.0)[1] == [
        ([[0, 1, 2, 3]], None, [0, 1, 2, 3]),
        ([[1, 3]], [0, 1], [1, 3]),
        (None, [0, 1, 2, 3], [1]),
        ([[1, 3], [0, 1]], None, [0, 1, 2, 3]),
        ([[1, 3], [1]], [0, 1], [1, 3]),
    ]
