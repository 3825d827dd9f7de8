"""Clipping and guards on two ranks: sharded gradients, and what is bad on one rank only."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_speedkit.optimize.clip_gradients import clip_by_norm, clip_by_value, clip_units, gradient_norm
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard, has_non_finite_gradient
from lightning_speedkit.optimize.snapshot import Snapshot
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from tests.optimize.test_clip_gradients import some_parameters
from tests.optimize.test_spike_guard import batches, fit, without
from tests.two_ranks import on_two_ranks

NAN = float("nan")
GUARDS = {
    "non-finite": (NonFiniteGuard, {}, {14: NAN}, {18: float("inf")}),
    "skip": (SpikeGuard, {"window": 5}, {14: 100.0}, {18: NAN}),
    "rollback": (SpikeGuard, {"action": "rollback", "window": 5, "snapshot_every": 4}, {14: 100.0}, {18: NAN}),
}
CLIPS = {
    "norm": lambda parameters: clip_by_norm(parameters, 0.5),
    "value": lambda parameters: clip_by_value(parameters, 0.5),
    "agc": lambda parameters: clip_units(parameters, 0.5),
}


def _guarded(rank: int) -> dict[str, Any]:
    found = {}
    for name, (guard, arguments, *bad) in GUARDS.items():
        callback = guard(**arguments)
        model = fit(batches(spikes=bad[rank]), callback, devices=2, strategy="ddp", use_distributed_sampler=False)
        found[name] = ([p.detach().clone() for p in model.parameters()], callback.state_dict())
    return found


def _sharded(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    placements = ([Shard(0)], [Replicate()], [Shard(0)])
    found: dict[str, Any] = {}
    for name, clip in CLIPS.items():
        whole = some_parameters(scale=3.0)[:3]
        shards = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, at)) for p, at in zip(whole, placements, strict=True)
        ]
        for shard, p, at in zip(shards, whole, placements, strict=True):
            shard.grad = distribute_tensor(p.grad, mesh, at)
        plain = _plain()
        norm = gradient_norm([*shards, plain])
        clip([*shards, plain])
        found[name] = [norm, *(p.grad.full_tensor() for p in shards), plain.grad]
    optimizer = torch.optim.SGD(shards, lr=0.1, momentum=0.9)
    module = nn.ParameterList(shards)
    optimizer.step()
    snapshot, before = Snapshot.take(module, optimizer), [p.full_tensor().clone() for p in shards]
    optimizer.step()
    snapshot.restore(module, optimizer)
    found["restored"] = [torch.equal(p.full_tensor(), old) for p, old in zip(shards, before, strict=True)]
    if rank == 1:
        shards[2].grad.to_local().fill_(NAN)
    found["flag"] = has_non_finite_gradient(optimizer).item()
    return found


def _plain() -> nn.Parameter:
    """A weight on no mesh, the same on both ranks."""
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.tensor([2.0, 5.0])
    return plain


def _runs() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found = _guarded(rank)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {**found, **_sharded(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two_ranks(_runs)


@pytest.mark.parametrize("name", GUARDS)
def test_both_do_the_same_though_only_one_has_the_bad_batch(ranks: Any, name: str) -> None:
    # A rollback at 14 takes back steps 8 to 13; the one at 18 takes back what was learnt since, from the same snapshot.
    places = range(8, 19) if name == "rollback" else (14, 18)
    expected = [p.detach() for p in fit(without(batches(), *places)).parameters()]
    for rank in ranks:
        weights, state = rank[name]
        assert state.get("spikes", state.get("skipped_steps")) == 2
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CLIPS)
def test_sharded_gradients_are_clipped_as_the_whole(ranks: Any, name: str) -> None:
    parameters: list[Tensor] = [*some_parameters(scale=3.0)[:3], _plain()]
    norm = gradient_norm(parameters)
    CLIPS[name](parameters)
    for rank in ranks:
        torch.testing.assert_close(rank[name], [norm, *(p.grad for p in parameters)])


def test_a_sharded_module_comes_back_from_its_snapshot(ranks: Any) -> None:
    assert [rank["restored"] for rank in ranks] == [[True] * 3] * 2


def test_what_is_not_finite_in_one_shard_is_known_on_both(ranks: Any) -> None:
    assert [rank["flag"] for rank in ranks] == [1.0, 1.0]
