"""The plans that a cluster allows for a model, each with its memory, its traffic and its time.

Ranks are numbered node by node. What talks most is placed nearest: ranks of one tensor-parallel group, one pipeline or
one sharding group of HSDP are neighbours; the data-parallel groups reach across.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_speedkit.facts.cluster import Cluster
from lightning_speedkit.parallel.cost_model import (
    compute_seconds,
    ddp_bytes,
    fsdp_bytes,
    model_state_bytes,
    pipeline_bubble,
    pipeline_bytes,
    step_seconds,
    tensor_parallel_activation_share,
    tensor_parallel_bytes,
)
from lightning_speedkit.parallel.suggest_plan import Memory, Plan, Traffic, traffic_of
from lightning_speedkit.parallel.suggest_profile import PRECISIONS, ModelProfile

__all__ = ["Assumptions", "possible_plans"]

_BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb
_BACKWARD = 2 / 3  # of the computing of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is not in the model or the cluster."""

    precision: str = "32-true"
    optimizer_states: float = 2
    utilization: float = 0.4


def possible_plans(profile: ModelProfile, cluster: Cluster, given: Assumptions) -> tuple[Plan, ...]:
    """Every plan for one device, one node and the whole cluster, whether it fits or not, in no order."""
    plans = [_data_parallel(profile, cluster, given, 1)]
    for devices in sorted({cluster.devices_per_node, cluster.devices} - {1}):
        plans.append(_data_parallel(profile, cluster, given, devices))
        plans.append(_sharded(profile, cluster, given, devices, replicas=1))
        if cluster.devices_per_node > 1 and devices > cluster.devices_per_node:
            replicas = devices // cluster.devices_per_node
            plans.append(_sharded(profile, cluster, given, cluster.devices_per_node, replicas=replicas))
        plans += [_tensor_parallel(profile, cluster, given, t, devices // t) for t in _splits(profile, cluster)]
        plans += [_pipeline(profile, cluster, given, p, devices // p, m) for p, m in _stages(profile, cluster, devices)]
    return tuple(plans)


def _splits(profile: ModelProfile, cluster: Cluster) -> Iterator[int]:
    for ranks in range(2, cluster.devices_per_node + 1):
        if profile.split_limit and cluster.devices_per_node % ranks == 0 and profile.split_limit % ranks == 0:
            yield ranks


def _stages(profile: ModelProfile, cluster: Cluster, devices: int) -> Iterator[tuple[int, int]]:
    """Stages and micro-batches: as many as the batch divides into, up to four per stage."""
    if profile.pipeline_container is None:
        return
    inside = cluster.devices_per_node
    for stages in range(2, min(devices, len(profile.blocks)) + 1):
        whole_nodes = inside % stages == 0 or stages % inside == 0
        micro = max(m for m in range(1, min(4 * stages, profile.batch_size) + 1) if profile.batch_size % m == 0)
        if devices % stages == 0 and whole_nodes and micro > 1:
            yield stages, micro


def _compute(profile: ModelProfile, cluster: Cluster, given: Assumptions, devices: int) -> float:
    speed = cluster.flops_per_second[PRECISIONS[given.precision][2]]
    return compute_seconds(profile.flops, devices, flops_per_second=speed, utilization=given.utilization)


def _state(given: Assumptions, parameter_bytes: float, trainable_bytes: float, shards: int = 1) -> float:
    return model_state_bytes(parameter_bytes, trainable_bytes, optimizer_states=given.optimizer_states, shards=shards)


def _plan(
    kind: str,
    traffic: tuple[Traffic, ...],
    compute: float,
    hideable: float,
    bubble: float,
    memory: Memory,
    **sizes: int,
) -> Plan:
    exposed = sum(entry.seconds for entry in traffic if not entry.hidden)
    hidden = sum(entry.seconds for entry in traffic if entry.hidden)
    return Plan(
        kind=kind,
        memory=memory,
        traffic=tuple(entry for entry in traffic if entry.sent_bytes),
        compute_seconds=compute,
        bubble=bubble,
        seconds_per_step=step_seconds(compute, exposed, hidden, hideable=hideable, bubble=bubble),
        **sizes,
    )


def _data_parallel(profile: ModelProfile, cluster: Cluster, given: Assumptions, ranks: int) -> Plan:
    sent = ddp_bytes(ranks, profile.trainable_bytes)
    hops = math.ceil(profile.trainable_bytes / _BUCKET_BYTES) * 2 * (ranks - 1)
    traffic = traffic_of("all-reduce of gradients, 2(n-1)/n", cluster, ranks, 1, sent, hops, hidden=True)
    memory = Memory(
        state_bytes=_state(given, profile.parameter_bytes, profile.trainable_bytes) + profile.buffer_bytes,
        gathered_bytes=0,
        activation_bytes=profile.activation_bytes + profile.batch_bytes,
    )
    compute = _compute(profile, cluster, given, 1)
    return _plan("ddp" if ranks > 1 else "single", (traffic,), compute, _BACKWARD, 0.0, memory, replicas=ranks)


def _gathered(profile: ModelProfile, split: float = 0.0) -> float:
    """What FSDP2 holds whole at once: the root, two blocks (one ahead) and the gradients of one and of the root.

    ``split`` is the part of the blocks' linear layers that tensor parallel keeps elsewhere.
    """
    blocks = [(b.parameter_bytes - split * b.linear_bytes, b.trainable_bytes) for b in profile.blocks]
    outside = profile.parameter_bytes - sum(b.parameter_bytes for b in profile.blocks)
    trainable = profile.trainable_bytes - sum(b.trainable_bytes for b in profile.blocks)
    parameters, gradients = max(blocks, default=(0.0, 0.0))
    return outside + trainable + 2 * parameters + min(gradients, parameters)


def _shard_traffic(
    profile: ModelProfile, cluster: Cluster, ranks: int, stride: int, elsewhere: float = 0.0
) -> tuple[Traffic, ...]:
    """FSDP2's: blocks are gathered twice, the root once, since it stays gathered; gradients are scattered.

    ``elsewhere`` bytes are kept by other ranks of the tensor-parallel group.
    """
    blocks = sum(block.parameter_bytes for block in profile.blocks)
    outside = profile.parameter_bytes - blocks
    sent = fsdp_bytes(ranks, blocks - elsewhere, max(0.0, profile.trainable_bytes - elsewhere))
    sent += fsdp_bytes(ranks, outside, 0, gathers=1)
    hops = (3 * len(profile.blocks) + 2) * (ranks - 1)
    what = "gather parameters twice and scatter gradients, 3(n-1)/n, what lies outside the blocks 2(n-1)/n"
    return (traffic_of(what, cluster, ranks, stride, sent, hops, hidden=True),)


def _sharded(profile: ModelProfile, cluster: Cluster, given: Assumptions, shards: int, replicas: int) -> Plan:
    traffic = _shard_traffic(profile, cluster, shards, 1)
    if replicas > 1:
        sent = ddp_bytes(replicas, profile.trainable_bytes / shards)
        hops = (len(profile.blocks) + 1) * 2 * (replicas - 1)
        what = "all-reduce of the own part of the gradients, 2(n-1)/n"
        traffic += (traffic_of(what, cluster, replicas, shards, sent, hops, hidden=True),)
    memory = Memory(
        state_bytes=_state(given, profile.parameter_bytes, profile.trainable_bytes, shards) + profile.buffer_bytes,
        gathered_bytes=_gathered(profile),
        activation_bytes=profile.activation_bytes + profile.batch_bytes,
    )
    compute = _compute(profile, cluster, given, 1)
    kind = "hsdp" if replicas > 1 else "fsdp"
    return _plan(kind, traffic, compute, 1.0, 0.0, memory, replicas=replicas * shards, shards=shards)


def _tensor_parallel(profile: ModelProfile, cluster: Cluster, given: Assumptions, ranks: int, replicas: int) -> Plan:
    linear = sum(block.linear_bytes for block in profile.blocks)
    elsewhere = linear * (1 - 1 / ranks)
    output = max(block.output_bytes for block in profile.blocks)
    sent = tensor_parallel_bytes(ranks, len(profile.blocks), output)
    hops = 4 * len(profile.blocks) * 2 * (ranks - 1)
    what = f"4 all-reduces of activations in each of {len(profile.blocks)} blocks, 2(n-1)/n"
    traffic = (traffic_of(what, cluster, ranks, 1, sent, hops, hidden=False),)
    if replicas > 1:
        traffic += _shard_traffic(profile, cluster, replicas, ranks, elsewhere)
    in_blocks = sum(block.activation_bytes for block in profile.blocks)
    share = tensor_parallel_activation_share(ranks)
    trainable = max(0.0, profile.trainable_bytes - elsewhere)
    memory = Memory(
        state_bytes=_state(given, profile.parameter_bytes - elsewhere, trainable, replicas) + profile.buffer_bytes,
        gathered_bytes=_gathered(profile, 1 - 1 / ranks) if replicas > 1 else 0,
        activation_bytes=profile.activation_bytes - in_blocks * (1 - share) + profile.batch_bytes,
    )
    compute = _compute(profile, cluster, given, ranks)
    sizes = {"replicas": replicas, "tensor": ranks, "shards": replicas}
    return _plan("tensor", traffic, compute, 1.0, 0.0, memory, **sizes)


def _pipeline(
    profile: ModelProfile, cluster: Cluster, given: Assumptions, stages: int, replicas: int, micro_batches: int
) -> Plan:
    """The fullest stage counts: the most blocks and all that lies outside them; with 1F1B the first keeps p batches."""
    most = math.ceil(len(profile.blocks) / stages)
    share = most / len(profile.blocks)
    in_blocks = sum(block.parameter_bytes for block in profile.blocks)
    trainable_in = sum(block.trainable_bytes for block in profile.blocks)
    activation_in = sum(block.activation_bytes for block in profile.blocks)
    parameters = profile.parameter_bytes - in_blocks * (1 - share)
    trainable = profile.trainable_bytes - trainable_in * (1 - share)
    kept = min(stages, micro_batches) / micro_batches
    output = max(block.output_bytes for block in profile.blocks)
    hops = 2 * (micro_batches + stages - 2)
    what = f"activations and their gradients between {stages} stages"
    traffic = (traffic_of(what, cluster, stages, 1, pipeline_bytes(stages, output), hops, hidden=False),)
    if replicas > 1:
        what = "all-reduce of a stage's gradients, 2(n-1)/n"
        sent = ddp_bytes(replicas, trainable)
        traffic += (traffic_of(what, cluster, replicas, stages, sent, 2 * (replicas - 1), hidden=False),)
    memory = Memory(
        state_bytes=_state(given, parameters, trainable) + profile.buffer_bytes,
        gathered_bytes=0,
        activation_bytes=(profile.activation_bytes - activation_in * (1 - share)) * kept + profile.batch_bytes,
    )
    compute = _compute(profile, cluster, given, stages) * share * stages
    bubble = pipeline_bubble(stages, micro_batches)
    sizes = {"replicas": replicas, "stages": stages, "micro_batches": micro_batches}
    return _plan("pipeline", traffic, compute, 0.0, bubble, memory, **sizes)
