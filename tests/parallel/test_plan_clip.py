"""The norm of gradients that are spread in different ways is that of the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_speedkit.parallel.plan_clip import clip_by_norm, clip_by_value, global_norm
from tests.two_ranks import on_ranks


def _wholes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for shape in ((5, 4), (6, 2), (3,), (1,), (4, 4))]


def _parameters() -> list[Tensor]:
    """In two dimensions, in one, over copies, and not at all; 5 and 1 rows do not divide by the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts: list[Any] = [(mesh, [Shard(0), Shard(1)]), (mesh["a"], [Shard(0)]), None]
    layouts += [(mesh["b"], [Shard(0)]), (mesh, [Replicate(), Shard(1)])]
    found: list[Tensor] = []
    for value, layout in zip(_wholes(), layouts, strict=True):
        made = nn.Parameter(value if layout is None else distribute_tensor(value, *layout))
        made.grad = made.detach().clone()
        found.append(made)
    return found


def _run() -> Any:
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    found = []
    for clip in (
        lambda ps: clip_by_norm(ps, 0.5, cpu),
        lambda ps: clip_by_norm(ps, 1e3, cpu),
        lambda ps: _by_value(ps),
    ):
        parameters = _parameters()
        norm = clip(parameters)
        grads = [p.grad for p in parameters]
        found.append((float(norm), [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]))
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.full((3,), float(dist.get_rank())), mesh, [Partial()])
    found.append((float(global_norm([partial], cpu)), []))
    dist.destroy_process_group()
    return found


def _by_value(parameters: list[Tensor]) -> float:
    clip_by_value(parameters, 0.5)
    return 0.0


def test_clipping_on_four_ranks() -> None:
    plain = []
    for limit in (0.5, 1e3):
        parameters = [nn.Parameter(value) for value in _wholes()]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        plain.append((float(norm), [p.grad for p in parameters]))
    plain.append((0.0, [value.clamp(-0.5, 0.5) for value in _wholes()]))
    for rank in on_ranks(4, _run, timeout=60.0):
        for (norm, grads), (expected, whole) in zip(rank[:3], plain, strict=True):
            assert norm == pytest.approx(expected, rel=1e-6)
            torch.testing.assert_close(grads, whole)
        assert rank[3][0] == pytest.approx(6 * 3**0.5)


def test_on_one_process() -> None:
    assert float(global_norm([], torch.device("cpu"))) == 0.0
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([3.0, float("nan")])
    assert torch.isnan(clip_by_norm([parameter, nn.Parameter(torch.ones(1))], 1.0, torch.device("cpu")))
    assert torch.isnan(parameter.grad).all()
