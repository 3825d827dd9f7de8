"""Which strategy is chosen, why, and that what is said to be enough is enough."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_speedkit.errors import FactsError, HardwareNeedError
from lightning_speedkit.facts.cluster import Cluster, Link, cluster_to_json, write_cluster
from lightning_speedkit.memory import estimate_memory
from lightning_speedkit.parallel.suggest import StrategyChoice, suggest_strategy

FAST, SLOW = Link(bytes_per_second=100e9), Link(bytes_per_second=1e9)
NODE = Cluster(
    nodes=1,
    devices_per_node=4,
    device_memory_bytes=10**9,
    flops_per_second={"32": 1e12, "bf16": 4e12},
    within_node=FAST,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def _suggest(cluster: Any, rows: int = 64, width: int = 256, depth: int = 8, **options: Any) -> StrategyChoice:
    with torch.device("meta"):
        return suggest_strategy(Net(width, depth), torch.zeros(rows, width), cluster, **options)


def test_one_device_is_a_choice_too() -> None:
    choice = _suggest(replace(NODE, devices_per_node=1, within_node=None))
    assert [plan.kind for plan in choice.plans] == ["single"]
    assert choice.trainer_arguments == {"strategy": "auto", "devices": 1, "num_nodes": 1, "precision": "32-true"}


def test_slow_links_leave_one_device_alone() -> None:
    slow = replace(NODE, within_node=Link(bytes_per_second=1e6))
    choice = _suggest(slow)
    assert choice.best.kind == "single"
    assert choice.trainer_arguments["devices"] == 1


def test_what_fits_is_copied_to_all_devices() -> None:
    choice = _suggest(replace(NODE, nodes=2, between_nodes=FAST), rows=4096)
    assert choice.best.name == "DDP 8"
    assert choice.trainer_arguments == {
        "strategy": "speedkit_ddp",
        "devices": 4,
        "num_nodes": 2,
        "precision": "32-true",
    }


def test_what_does_not_fit_is_sharded() -> None:
    # 16.8 million parameters with Adam: 268 MB; a quarter of that and two blocks fit into 130 MB
    choice = _suggest(replace(NODE, device_memory_bytes=160 * 10**6), rows=64, width=512)
    assert choice.best.name == "FSDP2 4"
    assert any(line.startswith("not DDP 4: it needs 2") and "too much" in line for line in choice.reasons)


def test_with_slow_links_between_nodes_shards_stay_inside() -> None:
    cluster = replace(NODE, nodes=2, device_memory_bytes=200 * 10**6, between_nodes=SLOW)
    choice = _suggest(cluster, rows=500, width=512)
    hsdp = next(plan for plan in choice.plans if plan.kind == "hsdp")
    whole = next(plan for plan in choice.plans if plan.name == "FSDP2 8")
    assert hsdp.seconds_per_batch < whole.seconds_per_batch


def test_activations_that_are_too_large_are_spread_with_the_layers() -> None:
    # sharding leaves 64 000 rows of activations whole: 8 x (512 + 2048) x 4 bytes each
    choice = _suggest(replace(NODE, device_memory_bytes=3 * 10**9), rows=64_000, width=512)
    assert choice.best.kind in ("tensor", "pipeline")
    fsdp = next(plan for plan in choice.plans if plan.name == "FSDP2 4")
    assert not choice.fits(fsdp)


def test_on_links_too_slow_for_gradients_a_pipeline_sends_least() -> None:
    cluster = replace(NODE, device_memory_bytes=200 * 10**6, within_node=Link(bytes_per_second=1e8))
    choice = _suggest(cluster, rows=64, width=512)
    assert choice.best.kind == "pipeline"
    assert choice.best.sent_bytes == min(plan.sent_bytes for plan in choice.plans if plan.devices > 1)


def test_the_table_and_its_reasons() -> None:
    choice = _suggest(replace(NODE, nodes=2, between_nodes=FAST, name="the lab"), rows=4096)
    lines = str(choice).splitlines()
    assert lines[0] == (
        "Net, 4.2 million parameters, 32-true, on the lab: 2 x 4 devices (nodes x devices per node), 1.0 GB each, "
        "900 MB of them counted on"
    )
    assert " ".join(lines[1].split()) == "plan devices memory per device sent per rank step per batch"
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(choice.plans)]] == [plan.name for plan in choice.plans]
    assert tuple(lines[2 + len(choice.plans) :]) == choice.reasons
    assert choice.reasons[0].startswith("DDP 8: memory: 16.8 MB parameters + 16.8 MB gradients + 33.6 MB optimizer")
    assert any("2(n-1)/n x 16.8 MB, n=8: 29.4 MB from each rank between nodes" in line for line in choice.reasons)
    assert any(line.startswith("not single device: ") and line.endswith("per batch") for line in choice.reasons)
    assert any(line.startswith("assumed, not measured: 40% of the peak FLOP/s") for line in choice.reasons)
    assert any("a step trains on 8 batches" in line for line in choice.reasons)


def test_what_was_not_considered_is_said() -> None:
    plain = suggest_strategy(nn.Linear(8, 8), torch.zeros(4, 8), NODE)
    assert "tensor parallel was not considered: there are no repeated blocks" in plain.reasons
    mixed = _suggest(replace(NODE, flops_per_second={"16": 1e12}), precision="16-mixed")
    assert "sharding and tensor parallel were not considered: not in 16-mixed" in mixed.reasons
    assert "pipeline was not considered: not in 16-mixed" in mixed.reasons


def test_the_estimate_of_memory_is_taken() -> None:
    model, batch = Net(64), torch.zeros(2048, 64)
    estimate = estimate_memory(model, batch, optimizer="sgd-momentum")
    single = suggest_strategy(model, batch, NODE, memory=estimate)
    (plan,) = (plan for plan in single.plans if plan.kind == "single")
    assert estimate.phase == "backward"
    assert plan.memory_bytes == estimate.peak_bytes
    assert single.assumptions.optimizer_states == pytest.approx(1.0, abs=1e-3)
    counted = suggest_strategy(model, batch, NODE, optimizer_states=1).plans
    (without,) = (plan for plan in counted if plan.kind == "single")
    assert without.memory_bytes == pytest.approx(estimate.peak_bytes, rel=0.15)  # tensors of the backward


@pytest.mark.parametrize("rows", [64, 64_000])
def test_the_smallest_cluster_that_would_do_is_enough_and_the_smallest(rows: int) -> None:
    small = replace(NODE, device_memory_bytes=400 * 10**6 if rows > 64 else 70 * 10**6, devices_per_node=2)
    with pytest.raises(HardwareNeedError, match=r"fits nowhere on .* bytes \(.*\) too few\. The smallest") as error:
        _suggest(small, rows=rows, width=512)
    nodes = int(str(error.value).partition("would do: ")[2].split()[0])
    larger = replace(small, nodes=nodes, between_nodes=FAST)
    assert _suggest(larger, rows=rows, width=512).best.devices > 1
    if nodes > 2:
        with pytest.raises(HardwareNeedError):
            _suggest(replace(larger, nodes=nodes - 1), rows=rows, width=512)


def test_when_no_cluster_would_do_the_memory_that_would_is_said() -> None:
    tiny = replace(NODE, devices_per_node=1, within_node=None, device_memory_bytes=10**8)
    with pytest.raises(HardwareNeedError, match=r"do not help: .* or devices with at least (.*) GB each") as error:
        _suggest(tiny, rows=64_000, width=512)
    needed = float(str(error.value).rpartition("at least ")[2].split()[0])
    enough = replace(tiny, device_memory_bytes=int(needed * 1.01e9))
    assert _suggest(enough, rows=64_000, width=512).best.kind == "single"


def test_a_cluster_in_a_file(tmp_path: Path) -> None:
    path = write_cluster(NODE, tmp_path / "lab.json")
    assert _suggest(path).plans == _suggest(NODE).plans == _suggest(str(path)).plans
    content = {**json.loads(cluster_to_json(NODE)), "nodes": 0}
    path.write_text(json.dumps(content))
    with pytest.raises(FactsError, match="nodes=0 must be at least 1"):
        _suggest(path)
    with pytest.raises(FileNotFoundError):
        _suggest(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_margin": 1}, ValueError, "memory_margin=1 must be from 0 to 0.99"),
        ({"utilization": 0}, ValueError, "utilization=0 must be from 0.001 to 1"),
        ({"utilization": float("nan")}, ValueError, "utilization=nan must be from"),
        ({"optimizer_states": -1}, ValueError, "optimizer_states=-1 must be from 0 to 100"),
        ({"optimizer_states": "2"}, TypeError, "optimizer_states='2' must be a number"),
        (
            {"precision": "64-true"},
            ValueError,
            r"needs flops_per_second\['64'\] of the cluster, which has '32', 'bf16'",
        ),
        ({"precision": "bf16"}, ValueError, "precision='bf16' is not one of"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _suggest(NODE, **options)


def test_hardware_is_a_cluster_or_a_path() -> None:
    with pytest.raises(TypeError, match="hardware must be a Cluster or the path of its JSON file, got int"):
        _suggest(5)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.floats(1e8, 1e12), st.integers(1, 64), st.sampled_from([16, 64, 1000]))
def test_more_memory_and_faster_links_are_never_worse(
    nodes: int, devices: int, speed: float, factor: int, rows: int
) -> None:
    cluster = Cluster(
        nodes=nodes,
        devices_per_node=devices,
        device_memory_bytes=100 * 10**6,
        flops_per_second={"32": 1e12},
        within_node=Link(bytes_per_second=speed, latency_seconds=1e-5),
        between_nodes=Link(bytes_per_second=speed / 4, latency_seconds=1e-5),
    )
    more = replace(cluster, device_memory_bytes=factor * cluster.device_memory_bytes)
    faster = replace(cluster, within_node=Link(bytes_per_second=factor * speed))
    choices = [_suggest(it, rows=rows, depth=3, memory_margin=0) for it in (cluster, more, faster)]
    seconds = [choice.best.seconds_per_batch for choice in choices]
    assert max(seconds[1:]) <= 1.01 * seconds[0]  # plans alike in three digits count as alike
    assert all(choices[0].fits(plan) == (plan.memory_bytes <= 100 * 10**6) for plan in choices[0].plans)


def test_every_strategy_can_be_built() -> None:
    cluster = replace(NODE, nodes=2, between_nodes=FAST)
    for precision in ("32-true", "bf16-mixed"):
        for plan in _suggest(cluster, precision=precision).plans:
            if isinstance(plan.strategy, str):
                assert plan.strategy in ("auto", "speedkit_ddp")
                continue
            package, _, name = plan.strategy["class_path"].rpartition(".")
            cls = getattr(importlib.import_module(package), name, None)
            if cls is None and name == "ModelParallelPlan":
                continue  # not in this version
            assert isinstance(cls, type)
            inspect.signature(cls).bind(**plan.strategy["init_args"])
            cls(**plan.strategy["init_args"])
