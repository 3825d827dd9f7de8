"""Every plan's memory and traffic, against formulas with the numbers of a model and a cluster put in by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_speedkit.facts.cluster import Cluster, Link
from lightning_speedkit.parallel.suggest_blocks import BlockProfile
from lightning_speedkit.parallel.suggest_candidates import Assumptions, possible_plans
from lightning_speedkit.parallel.suggest_plan import Plan
from lightning_speedkit.parallel.suggest_profile import ModelProfile

MB = 10**6
BLOCK = BlockProfile(
    path="net.0",
    class_name="Block",
    parameter_bytes=100 * MB,
    trainable_bytes=100 * MB,
    linear_bytes=96 * MB,
    activation_bytes=34 * MB,
    output_bytes=8 * MB,
)
MODEL = ModelProfile(  # 8 blocks and 80 MB beside them
    name="Model",
    parameters=220 * MB,
    parameter_bytes=880 * MB,
    trainable_bytes=880 * MB,
    buffer_bytes=1 * MB,
    activation_bytes=300 * MB,
    weight_copy_bytes=0,
    batch_bytes=2 * MB,
    batch_size=16,
    flops=8 * 10**12,
    blocks=(BLOCK,) * 8,
    split_limit=64,
    pipeline_path="net",
)
ONE_NODE = Cluster(
    nodes=1,
    devices_per_node=4,
    device_memory_bytes=10**10,
    flops_per_second={"32": 10e12, "bf16": 100e12, "16": 100e12},
    within_node=Link(bytes_per_second=100e9),
)
FOUR_NODES = replace(ONE_NODE, nodes=4, between_nodes=Link(bytes_per_second=10e9))


def _plans(profile: ModelProfile = MODEL, cluster: Cluster = ONE_NODE, precision: str = "32-true") -> dict[str, Plan]:
    plans = possible_plans(profile, cluster, Assumptions(precision=precision, utilization=0.5))
    assert len({plan.name for plan in plans}) == len(plans)
    return {plan.name: plan for plan in plans}


def test_which_plans_there_are() -> None:
    assert list(_plans()) == [
        *("single device", "DDP 4", "FSDP2 4", "tensor parallel 2 x FSDP2 2", "tensor parallel 4"),
        *("pipeline 2 x DDP 2", "pipeline 4"),
    ]
    many = _plans(cluster=FOUR_NODES)
    assert {"DDP 16", "FSDP2 16", "HSDP 4 x 4", "tensor parallel 4 x FSDP2 4", "pipeline 8 x DDP 2"} <= set(many)
    assert {plan.devices for plan in many.values()} == {1, 4, 16}
    assert "pipeline 16" not in many  # of 8 blocks
    lone = replace(ONE_NODE, devices_per_node=1, within_node=None)
    assert list(_plans(cluster=lone)) == ["single device"]


def test_a_single_device_and_data_parallel() -> None:
    plans = _plans()
    for name in ("single device", "DDP 4"):
        assert plans[name].memory_bytes == (4 * 880 + 300 + 2 + 1) * MB  # Adam: four times the parameters
        assert plans[name].compute_seconds == 8e12 / 5e12
    assert plans["DDP 4"].sent_bytes == 2 * 3 / 4 * 880 * MB
    assert plans["single device"].sent_bytes == 0
    assert plans["DDP 4"].seconds_per_batch == pytest.approx(1.6 / 4)  # the traffic hides behind the backward


def test_sharding() -> None:
    plans = _plans(cluster=FOUR_NODES)
    # beside the blocks 80 and its gradients 80, two blocks 200, gradients of one 100
    assert plans["FSDP2 4"].memory_bytes == (880 + 460 + 300 + 2 + 1) * MB
    assert plans["FSDP2 16"].memory_bytes == (220 + 460 + 300 + 2 + 1) * MB
    assert plans["HSDP 4 x 4"].memory_bytes == plans["FSDP2 4"].memory_bytes
    # blocks three times, what is beside them twice
    assert plans["FSDP2 4"].sent_bytes == pytest.approx(3 / 4 * (3 * 800 + 2 * 80) * MB)
    *shards, copies = plans["HSDP 4 x 4"].traffic
    assert sum(entry.sent_bytes for entry in shards) == plans["FSDP2 4"].sent_bytes
    assert not any(entry.between_nodes for entry in shards)
    assert copies.sent_bytes == pytest.approx(2 * 3 / 4 * 220 * MB)
    assert copies.seconds == pytest.approx(4 * 330 * MB / 10e9)  # the four of a node share its link


def test_bfloat16_is_gathered_in_half_the_bytes_and_needs_no_copies_of_weights() -> None:
    model = replace(MODEL, weight_copy_bytes=440 * MB)
    plans = _plans(model, precision="bf16-mixed")
    assert plans["DDP 4"].memory.weight_copy_bytes == 440 * MB
    assert plans["FSDP2 4"].memory.weight_copy_bytes == 0
    assert plans["FSDP2 4"].memory.gathered_bytes == (40 + 80 + 100 + 100) * MB
    assert plans["FSDP2 4"].sent_bytes == pytest.approx(3 / 4 * (2 * 400 + 40 + 880) * MB)
    assert plans["FSDP2 4"].strategy == {
        "class_path": "lightning_speedkit.ModelParallelPlan",
        "init_args": {"shard_class": ["Block"], "gather_precision": "bf16"},
    }


def test_tensor_parallel() -> None:
    plan = _plans()["tensor parallel 4"]
    left = 880 - 8 * 96 * 3 / 4  # the linear layers in four
    assert plan.memory.parameter_bytes == left * MB
    # of the 34 bytes per element of a block 10 are kept whole
    assert plan.memory.activation_bytes == pytest.approx((300 - 8 * 34 + 8 * (10 + 24 / 4)) * MB)
    assert plan.sent_bytes == 4 * 8 * 2 * 3 / 4 * 8 * MB
    assert plan.compute_seconds == pytest.approx(1.6 / 4)
    assert plan.seconds_per_step == pytest.approx(0.4 + plan.sent_bytes / 100e9)
    mixed = _plans()["tensor parallel 2 x FSDP2 2"]
    assert mixed.memory.state_bytes == pytest.approx(4 * (880 - 8 * 48) / 2 * MB)
    assert sum(entry.sent_bytes for entry in mixed.traffic[1:]) == pytest.approx(
        1 / 2 * (3 * (800 - 8 * 48) + 2 * 80) * MB
    )
    arguments = {"data_parallel": 2, "tensor_parallel": 2, "shard_class": ["Block"]}
    assert mixed.strategy == {"class_path": "lightning_speedkit.ModelParallelPlan", "init_args": arguments}


def test_a_pipeline() -> None:
    plan = _plans(cluster=FOUR_NODES)["pipeline 8 x DDP 2"]
    assert (plan.stages, plan.micro_batches, plan.replicas) == (8, 16, 2)
    assert plan.bubble == 7 / 23
    assert plan.memory.parameter_bytes == (80 + 100) * MB
    assert plan.memory.activation_bytes == pytest.approx((28 + 34) / 2 * MB)  # 8 of the 16 micro-batches
    between, gradients = plan.traffic
    assert between.sent_bytes == 2 * 8 * MB
    assert gradients.sent_bytes == 180 * MB
    assert plan.compute_seconds == pytest.approx(1.6 / 8)
    step = 0.2 / (1 - 7 / 23) + between.seconds + gradients.seconds
    assert plan.seconds_per_batch == pytest.approx(step / 2)
    arguments = {"attribute": "net", "pipeline_size": 8, "microbatches": 16}
    assert plan.strategy == {"class_path": "lightning_speedkit.PipelineStrategy", "init_args": arguments}


def test_autocast_copies_a_stages_weights_in_each_micro_batch() -> None:
    plan = _plans(replace(MODEL, weight_copy_bytes=440 * MB), precision="bf16-mixed")["pipeline 4"]
    assert plan.memory.weight_copy_bytes == pytest.approx(4 * (80 + 200) / 2 * MB)


def test_an_uneven_pipeline_waits_for_its_fullest_stage() -> None:
    plan = _plans(replace(MODEL, blocks=(BLOCK,) * 6, parameter_bytes=680 * MB))["pipeline 4"]
    assert plan.compute_seconds == pytest.approx(1.6 * 2 / 6)


def test_micro_batches_divide_the_batch_and_are_at_least_as_many_as_stages() -> None:
    assert _plans(replace(MODEL, batch_size=6))["pipeline 4"].micro_batches == 6
    assert "pipeline 4" not in _plans(replace(MODEL, batch_size=3))
    assert _plans(replace(MODEL, batch_size=100))["pipeline 4"].micro_batches == 10


def test_what_a_strategy_cannot_do_is_no_plan() -> None:
    kinds = {plan.kind for plan in _plans(precision="16-mixed").values()}
    assert kinds == {"single", "ddp"}
    assert "tensor parallel 4" not in _plans(replace(MODEL, split_limit=6))
    plain = replace(MODEL, blocks=(), split_limit=0, pipeline_path="")
    assert {plan.kind for plan in _plans(plain, FOUR_NODES).values()} == {"single", "ddp", "fsdp", "hsdp"}
    assert _plans(plain)["FSDP2 4"].memory.gathered_bytes == 2 * 880 * MB  # all at once
    assert "gather_precision" not in str(_plans(plain)["FSDP2 4"].strategy)


def test_frozen_parameters_have_no_gradients_and_are_not_sent() -> None:
    block = replace(BLOCK, trainable_bytes=0)
    plans = _plans(replace(MODEL, trainable_bytes=80 * MB, blocks=(block,) * 8))
    assert plans["DDP 4"].memory.state_bytes == (880 + 3 * 80) * MB
    assert plans["DDP 4"].sent_bytes == 1.5 * 80 * MB
    assert plans["FSDP2 4"].memory.gathered_bytes == (80 + 80 + 200) * MB
    assert plans["FSDP2 4"].sent_bytes == pytest.approx(3 / 4 * (2 * 800 + 80 + 80) * MB)
