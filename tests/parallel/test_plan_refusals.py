"""Arguments, Trainers and batches that would be trained wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import init_device_mesh

from lightning_speedkit.parallel.plan import ModelParallelPlan
from lightning_speedkit.parallel.plan_refusals import check_optimizers, check_same_batch, explained
from tests.parallel.plan_models import Net
from tests.two_ranks import on_two_ranks

ARGUMENTS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"data_parallel": 0}, ValueError, "data_parallel=0 must be a whole number of at least 1, or 'auto'"),
    ({"data_parallel": "all"}, ValueError, "data_parallel='all' must be a whole number"),
    ({"tensor_parallel": True}, ValueError, "tensor_parallel=True must be a whole number"),
    ({"replicas": 1.0}, ValueError, "replicas=1.0 must be a whole number"),
    ({"shard_min_parameters": -1}, ValueError, "shard_min_parameters=-1 must be"),
    ({"shard_class": "Block"}, TypeError, r"shard_class='Block' must be a list of names of classes, as \['Block'\]"),
    ({"shard_class": []}, ValueError, r"shard_class=\[\] names no class"),
    ({"gather_precision": "fp8"}, ValueError, "gather_precision='fp8' is unknown; use 'bf16' or None"),
    ({"cpu_offload": 1}, TypeError, "cpu_offload=1 must be True or False"),
    ({"save": "part"}, ValueError, "save='part' is unknown"),
    ({"tensor_plan": {"x": "row"}}, ValueError, "tensor_parallel=1 cuts nothing"),
    ({"tensor_plan": {"x": "rows"}, "tensor_parallel": 2}, ValueError, "is unknown. Did you mean 'row'"),
    ({"timeout_seconds": 0}, ValueError, "timeout_seconds=0 must be from"),
)


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS)
def test_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ModelParallelPlan(**arguments)


def test_optimizers_that_join_what_is_spread() -> None:
    net = Net()
    check_optimizers([torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)])
    with pytest.raises(MisconfigurationException, match="LBFGS joins all gradients"):
        check_optimizers([torch.optim.LBFGS(net.parameters())])


def _differ() -> list[str]:
    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), []
    rank = dist.get_rank()
    for batch, seed in (([torch.ones(2), "x"], 0), ({"x": torch.ones(2) + rank}, 0), (torch.ones(2), rank)):
        torch.manual_seed(seed)
        try:
            check_same_batch(batch, mesh)
            found.append("")
        except MisconfigurationException as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


def test_ranks_that_share_layers_need_the_same_batches() -> None:
    check_same_batch(torch.ones(2), None)
    for same, batches, numbers in on_two_ranks(_differ, timeout=60.0):
        assert same == ""
        assert "have different batches" in batches
        assert "have different random numbers" in numbers


def test_an_error_of_torch_about_spread_weights_is_explained() -> None:
    with pytest.raises(MisconfigurationException, match="outside of the forward of its own module"), explained():
        raise RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor, need to convert")
    with pytest.raises(RuntimeError, match="else"), explained():
        raise RuntimeError("something else")
