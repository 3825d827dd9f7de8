"""A plan keeps its budget at the least cost: against the CPU allocator's own record, and against all sets."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.memory import (
    ActivationCheckpointing,
    CheckpointPlan,
    checkpoint_modules,
    uncheckpoint_modules,
)
from lightning_speedkit.memory.checkpoint_budget import budget_bytes, checked_budget, plan_checkpoints
from lightning_speedkit.memory.checkpoint_budget_model import ModuleProfile
from lightning_speedkit.memory.checkpoint_budget_peak import measure_peak_bytes
from lightning_speedkit.memory.recomputation import Recomputed
from tests.memory.allocations import allocated_peak
from tests.two_ranks import on_two_ranks


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def _convolutional() -> tuple[nn.Module, Callable[[], Any]]:
    """Four blocks of two sizes."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), Residual(8), Residual(8), nn.MaxPool2d(2), nn.Conv2d(8, 12, 1)),
        *(Residual(12), Residual(12), nn.Flatten(), nn.Linear(12 * 256, 2)),
    )
    x = torch.randn(4, 3, 32, 32)
    return model, lambda: model(x).square().mean().backward()


def _transformer() -> tuple[nn.Module, Callable[[], Any]]:
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(16, 16, 16)
    return model, lambda: model(x).square().mean().backward()


def _allocated(model: nn.Module, run: Callable[[], Any], paths: Sequence[str] = ()) -> int:
    """The peak by the record of the CPU's allocator, with the gradients there from the start."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if paths:
        checkpoint_modules(model, list(paths))
    peak = allocated_peak(run)
    uncheckpoint_modules(model)
    return peak


@pytest.mark.parametrize(
    ("make", "blocks", "unseen"),
    [(_convolutional, "Residual", 0.03), (_transformer, "TransformerEncoderLayer", 0.04)],
)
def test_no_set_within_the_budget_is_cheaper_and_the_plan_is_within(
    make: Callable[[], tuple[nn.Module, Callable[[], Any]]], blocks: str, unseen: float
) -> None:
    model, run = make()
    plain = _allocated(model, run)
    paths = [told.path for told in plan_checkpoints(model, run, 1.0, blocks).profile]
    every = itertools.chain.from_iterable(itertools.combinations(paths, k) for k in range(len(paths) + 1))
    peaks = {chosen: _counted(model, run, chosen) for chosen in every}
    least = min(peaks.values())
    for budget in (0.75, f"{int(1.03 * least)}B"):
        plan = plan_checkpoints(model, run, budget, blocks)
        assert plan.peak_bytes <= plan.budget_bytes
        assert plan.peak_bytes == pytest.approx(peaks[plan.paths], rel=0.01)
        # In models as small as these, buffers inside kernels and copies of the random state are a part.
        assert plan.peak_bytes == pytest.approx(_allocated(model, run, plan.paths), abs=unseen * plain)
        seconds = _seconds_of_kinds(plan.profile)
        allowed = [chosen for chosen, peak in peaks.items() if peak <= 0.99 * plan.budget_bytes]
        best = min(sum(seconds[path] for path in chosen) for chosen in allowed)
        assert sum(seconds[path] for path in plan.paths) <= 1.0001 * best


def _counted(model: nn.Module, run: Callable[[], Any], paths: Sequence[str]) -> int:
    model.zero_grad()
    if paths:
        checkpoint_modules(model, list(paths))
    peak = measure_peak_bytes(model, run, torch.device("cpu"))
    uncheckpoint_modules(model)
    return peak


def _seconds_of_kinds(profile: Sequence[Any]) -> dict[str, float]:
    """Blocks that save the same take the same time: the middle one of their measured times."""
    times: dict[object, list[float]] = {}
    for told in profile:
        times.setdefault((told.saved_bytes, told.kept_bytes, told.transient_bytes), []).append(told.seconds)
    return {
        told.path: statistics.median(times[told.saved_bytes, told.kept_bytes, told.transient_bytes]) for told in profile
    }


def test_a_profile_counts_every_storage_once_and_no_parameter() -> None:
    """Of linear, tanh, linear on 32 rows in float32: tanh's result is saved by two nodes; the input is the block's."""
    block = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 1))
    x = torch.randn(32, 4)
    (told,) = plan_checkpoints(model, lambda: model(x).sum().backward(), 1.0, "1").profile
    assert (told.saved_bytes, told.kept_bytes) == (32 * 64 * 4, 32 * 8 * 4)
    assert told.transient_bytes == 32 * 64 * 4  # the first linear's result, while tanh makes its own
    assert told.seconds > 0


def test_a_budget_that_needs_nothing_gives_no_modules() -> None:
    model, run = _transformer()
    plan = plan_checkpoints(model, run, "1GB")
    assert (plan.paths, plan.recompute_seconds, plan.budget_bytes) == ((), 0.0, 10**9)
    assert plan.peak_bytes == plan.plain_peak_bytes


def test_modules_inside_blocks_are_used_where_a_whole_block_is_too_much() -> None:
    model, run = _transformer()
    plan = plan_checkpoints(model, run, 0.93)
    assert plan.paths
    assert all(path.endswith("self_attn") for path in plan.paths)
    assert not any(inner.startswith(f"{outer}.") for inner in plan.paths for outer in plan.paths)


class Steps(nn.Module):
    """Draws random numbers, and keeps a buffer from its first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)) for _ in "123")
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.ones(()))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("budget", [0.7, 0.01])
def test_everything_is_as_found_afterwards(budget: float) -> None:
    model, x = Steps(), torch.randn(256, 8)
    model.norm.weight.grad = gradient = torch.full((8,), 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [*model.buffers(), *model.parameters()]
    random = torch.get_rng_state()

    def run() -> None:
        model(x).square().sum().backward()

    if budget < 0.1:
        with pytest.raises(ValueError, match=r"the least that can be reached is [\d,]+, with these modules"):
            plan_checkpoints(model, run, budget)
    else:
        assert plan_checkpoints(model, run, budget).paths
    assert torch.equal(torch.get_rng_state(), random)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(one is other for one, other in zip([*model.buffers(), *model.parameters()], objects, strict=True))
    assert model.norm.weight.grad is gradient
    assert torch.equal(gradient, torch.full((8,), 3.0))
    assert model.blocks[0][0].weight.grad is None
    assert not any(isinstance(module, Recomputed) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_the_run_writes_to_are_as_found(fails: bool) -> None:
    model, x, runs = Steps(), torch.randn(256, 8), 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = list(model.parameters())

    def run() -> None:
        nonlocal runs
        runs += 1
        with torch.no_grad():
            model.blocks[0][0].weight.clamp_(-0.01, 0.01)  # a clipped critic
            model.blocks[1][0].bias.data.mul_(0.9)  # leaves no trace in the version
        model.norm.bias = nn.Parameter(torch.ones(8))
        model(x).square().sum().backward()
        if fails and runs == 3:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") if fails else nullcontext():
        assert plan_checkpoints(model, run, 0.7).paths
    assert runs > 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))


def test_an_error_of_the_run_comes_out_and_undoes_everything() -> None:
    model, x = Steps(), torch.randn(256, 8)
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1
        model(x).sum().backward()
        if runs == 8:  # after one plain, one traced and five timed: the first set
            assert any(isinstance(module, Recomputed) for module in model.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        plan_checkpoints(model, run, 0.6)
    assert not any(isinstance(module, Recomputed) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_least_that_can_be_reached_is_what_the_error_says() -> None:
    model, run = _convolutional()
    with pytest.raises(ValueError, match="least that can be reached") as caught:
        plan_checkpoints(model, run, 0.05)
    least = int(str(caught.value).split("reached is ")[1].split(", with")[0].replace(",", ""))
    assert plan_checkpoints(model, run, f"{least}B").peak_bytes <= least
    with pytest.raises(ValueError, match="least that can be reached"):
        plan_checkpoints(model, run, f"{int(0.97 * least)}B")


@pytest.mark.parametrize(
    ("text", "expected"), [("4GB", 4 * 10**9), ("512 MiB", 2**29), ("1.5kb", 1500), ("7B", 7), (0.25, 250), (1.0, 1000)]
)
def test_budgets_in_bytes(text: str | float, expected: int) -> None:
    assert budget_bytes(text, 1000) == expected


@pytest.mark.parametrize("wrong", ["4", "GB", "0GB", "-1GB", "4 XB", "", 0.0, 1.5, -0.5, float("nan"), 2**30])
def test_what_is_no_budget_is_told(wrong: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        checked_budget(wrong)


def test_a_percentage_is_told_as_a_number() -> None:
    with pytest.raises(ValueError, match=r"budget='40 %': a part of the peak .* is a number; write 0\.4\.$"):
        checked_budget("40 %")


def test_where_recomputing_helps_nothing_that_is_told() -> None:
    small = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model, x = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 4), small), torch.randn(64, 4)
    with pytest.raises(ValueError, match="without recomputing anything: no candidate holds enough"):
        plan_checkpoints(model, lambda: model(x).sum().backward(), 0.5)


def test_a_plan_is_told_in_a_sentence() -> None:
    profile = tuple(ModuleProfile(path, 1, 1, 1, 1.0) for path in map(str, range(20)))
    plan = CheckpointPlan(("3", "5"), 1500, 4000, 2000, 0.25, 1.0, profile)
    assert plan.describe() == (
        "2 of 20 candidates are recomputed: 3, 5. Without, the step peaks at 4,000 bytes; with it at 1,500, of 2,000 "
        "allowed, and it takes about 25% longer."
    )
    assert "11, and 3 more, see plan.paths" in replace(plan, paths=tuple(map(str, range(15)))).describe()
    none = replace(plan, paths=(), budget_bytes=5000)
    assert none.describe() == "nothing is recomputed: the step peaks at 4,000 bytes, and 5,000 are allowed."


@pytest.mark.parametrize("wrong", [None, True, [0.5]])
def test_what_is_of_the_wrong_kind_is_told(wrong: Any) -> None:
    with pytest.raises(TypeError, match="budget"):
        checked_budget(wrong)


class Ranked(pl.LightningModule):
    """Its batches have 256 rows on rank 0, and ``rows`` on rank 1."""

    def __init__(self, rows: int, gathers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.rows, self.gathers = Steps(), rows, gathers

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.network(batch).square().sin().mean()
        if self.gathers:
            loss = loss + self.all_gather(loss, sync_grads=True).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows = self.rows if os.environ["RANK"] == "1" else 256
        return DataLoader(torch.randn(3 * rows, 8, generator=torch.Generator().manual_seed(1)), batch_size=rows)


class Watch(Callback):
    paths: tuple[str, ...] = ()

    def on_before_zero_grad(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.paths = tuple(path for path, module in pl_module.named_modules() if isinstance(module, Recomputed))


def _fit(module: Ranked, *callbacks: Callback) -> list[Tensor]:
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


def _on_a_rank() -> tuple[list[tuple[bool, tuple[str, ...]]], str]:
    found = []
    for rows, budget in ((256, 0.6), (1024, "600KB")):  # without checkpointing 270 KB, with 1024 rows 1.1 MB
        watch = Watch()
        planned = _fit(Ranked(rows), ActivationCheckpointing("Sequential", budget=budget), watch)
        found.append((all(map(torch.equal, planned, _fit(Ranked(rows)))), watch.paths))
    with pytest.raises(RuntimeError) as caught:
        _fit(Ranked(256, gathers=True), ActivationCheckpointing("Sequential", budget=0.6))
    return found, str(caught.value)


def test_two_ranks_take_one_plan_if_their_batches_are_alike_and_the_weights_are_the_same_if_not() -> None:
    first, second = on_two_ranks(_on_a_rank, timeout=60)
    two = ("network.blocks.0", "network.blocks.1")
    assert first[0] == [(True, two), (True, ())]
    assert second[0] == [(True, two), (True, two)]
    # Ranks may take different numbers of trial steps, so none may wait for another in them.
    assert "exchanges tensors with other ranks (c10d.allgather_" in first[1]
    assert second[1] == first[1]
