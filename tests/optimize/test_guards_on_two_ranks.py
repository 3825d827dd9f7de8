"""Clipping and guards on two ranks: sharded gradients, and what is bad on one rank only."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.clip_gradients import clip_by_norm, clip_by_value, clip_units, gradient_norm
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard, has_non_finite_gradient
from lightning_speedkit.optimize.snapshot import Snapshot
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from tests.optimize.line import Line, loader, trainer
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


class _Shardable(Line):
    """A net that is sharded where the strategy has a mesh. The loss is multiplied by the first number of the batch."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
        del self.w

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch[:, 1:]).square().mean() + 0.1) * batch[0, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


SHARDED: dict[str, tuple[Any, dict[int, float]]] = {
    "norm": (lambda: GradientClipping(limit=0.05), {}),
    "value": (lambda: GradientClipping("value", 0.02), {}),
    "non-finite": (NonFiniteGuard, {3: NAN, 5: float("inf")}),
    "skip": (lambda: SpikeGuard(window=2), {3: NAN, 5: 100.0}),
    "rollback": (lambda: SpikeGuard("rollback", window=2, snapshot_every=2), {5: 100.0}),
}


def _shares(bad: dict[int, float]) -> Tensor:
    """Of 8 batches: two ranks, 4 samples. Rank 1 has the bad ones."""
    data = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(6))
    data[:, :, 0, 0] = 1.0
    for place, value in bad.items():
        data[place, 1, 0, 0] = value
    return data


def _with_fsdp2(rank: int) -> dict[str, Any]:
    """The weights after a run, what is logged, and the warnings."""
    found = {}
    for name, (make, bad) in SHARDED.items():
        model, callback, logged = _Shardable(), make(), _Logged()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        run = trainer(
            callback, logged, strategy=strategy, devices=2, use_distributed_sampler=False, log_every_n_steps=1
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.fit(model, loader(list(_shares(bad)[:, rank])))
        weights = [p.detach().full_tensor() for p in model.parameters()]
        said = [str(w.message) for w in told if "not finite" in str(w.message)]
        found[f"fsdp2 {name}"] = (weights, run.global_step, logged.norms, said)
    return found


class _Logged(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if "gradient_norm" in trainer.callback_metrics:
            self.norms.append(trainer.callback_metrics["gradient_norm"].item())


class _Sums(Line):
    """The sum of a rank that runs ``training_step`` alone would wait for the other without end."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        del self.w

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        mean = out.detach().mean()
        dist.all_reduce(mean)
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def _told(rank: int) -> dict[str, Any]:
    """What each rank says of a batch, and of a module, that only rank 1 has NaN from."""
    found = {}
    for name in ("batch", "module"):
        model = _Sums()
        data = torch.rand(3, 4, 3)
        if rank == 1 and name == "batch":
            data[1, 0, 0] = NAN
        if name == "module":
            model.net.insert(0, _Root())
            data[1, 0, 0] = -1.0 if rank == 1 else 1.0
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = trainer(NonFiniteGuard(), devices=2, strategy="ddp", use_distributed_sampler=False)
            run.fit(model, loader(list(data)))
        said = [str(w.message) for w in told if "not finite" in str(w.message)]
        found[f"told {name}"] = said
    return found


def _plain() -> nn.Parameter:
    """A weight on no mesh, the same on both ranks."""
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.tensor([2.0, 5.0])
    return plain


def _runs() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found = {**_guarded(rank), **_told(rank), **_with_fsdp2(rank)}
    return {**found, **_sharded(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two_ranks(_runs, timeout=60.0)


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


@pytest.mark.parametrize("name", SHARDED)
def test_callbacks_with_sharded_parameters(ranks: Any, name: str) -> None:
    """The oracle: a plain loop over the batches of both ranks together, without the bad ones."""
    bad = SHARDED[name][1]
    model, norms = _Shardable(), []
    optimizer = model.configure_optimizers()
    taken_back = {2, 3, 4} if name == "rollback" else set()  # the snapshot before batch 4 is one step old
    for place, batch in enumerate(_shares({})):
        if place in bad or place in taken_back:
            continue
        optimizer.zero_grad()
        model.training_step(batch.flatten(0, 1), 0).backward()
        if name == "norm":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        if name == "value":
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    for rank in ranks:
        weights, steps, logged, _ = rank[f"fsdp2 {name}"]
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], rtol=1e-5, atol=1e-6)
        assert steps == 8 - len(bad)
        assert logged == pytest.approx(norms, rel=1e-5)
    if norms:
        assert min(norms) > 0.05  # there was something to clip


def test_the_rank_that_has_it_names_it(ranks: Any) -> None:
    """Rank 0 says in its own words that it has no part in it, or cannot know; no rank waits for the other."""
    for name, words in (("batch", "on rank 1, it is in the batch."), ("module", "on rank 1, module 'net.0' (_Root)")):
        zero, one = ranks[0][f"told {name}"], ranks[1][f"told {name}"]
        assert len(zero) == len(one) == 1
        assert f"Where it came from: {words}" in one[0]
        assert "Where it came from: the forward or backward pass of some rank made it" in zero[0]
    assert "on rank 1, it is in the batch." in ranks[1]["fsdp2 non-finite"][3][0]
