"""The plans that a cluster allows for a model, each with its memory, its traffic and its time.

Ranks are numbered node by node. What talks most is placed nearest: ranks of one tensor-parallel group, one pipeline or
one sharding group of HSDP are neighbours; the data-parallel groups reach across.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_speedkit.facts.cluster import Cluster
from lightning_speedkit.parallel.cost_model import (
    ddp_bytes,
    fsdp_bytes,
    pipeline_bytes,
    reduce_scatter_bytes,
    tensor_parallel_activation_share,
    tensor_parallel_bytes,
)
from lightning_speedkit.parallel.suggest_plan import (
    BACKWARD,
    Memory,
    Plan,
    Traffic,
    bytes_text,
    priced_plan,
    traffic_of,
)
from lightning_speedkit.parallel.suggest_profile import PRECISIONS, ModelProfile

__all__ = ["PIPELINE_PRECISIONS", "SHARDED_PRECISIONS", "Assumptions", "possible_plans"]

SHARDED_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
PIPELINE_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is not in the model or the cluster."""

    precision: str = "32-true"
    optimizer_states: float = 2
    utilization: float = 0.4


def possible_plans(profile: ModelProfile, cluster: Cluster, given: Assumptions) -> tuple[Plan, ...]:
    """Every plan for one device, one node and the whole cluster, whether it fits or not, in no order."""
    writer = _Writer(profile, cluster, given)
    plans = [writer.data_parallel(1)]
    inside = cluster.devices_per_node
    for devices in sorted({inside, cluster.devices} - {1}):
        plans.append(writer.data_parallel(devices))
        if given.precision in SHARDED_PRECISIONS:
            plans.append(writer.sharded(devices, copies=1))
            if 1 < inside < devices:
                plans.append(writer.sharded(inside, copies=devices // inside))
            plans += [writer.tensor_parallel(ranks, devices // ranks) for ranks in writer.splits()]
        if given.precision in PIPELINE_PRECISIONS:
            plans += [writer.pipeline(p, devices // p, m) for p, m in writer.stages(devices)]
    return tuple(plans)


class _Writer:
    """Writes plans for one model on one cluster."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, given: Assumptions) -> None:
        self.profile, self.cluster, self.given = profile, cluster, given
        blocks = profile.blocks
        self.in_blocks = sum(block.parameter_bytes for block in blocks)
        self.trainable_in_blocks = sum(block.trainable_bytes for block in blocks)
        self.activations_in_blocks = sum(block.activation_bytes for block in blocks)
        self.classes = sorted({block.class_name for block in blocks})
        self.whole = Memory(
            parameter_bytes=profile.parameter_bytes,
            trainable_bytes=profile.trainable_bytes,
            optimizer_states=given.optimizer_states,
            activation_bytes=profile.activation_bytes,
            batch_bytes=profile.batch_bytes,
            buffer_bytes=profile.buffer_bytes,
            weight_copy_bytes=profile.weight_copy_bytes,
        )
        self.halved = given.precision == "bf16-mixed"  # ModelParallelPlan gathers in bfloat16

    def splits(self) -> Iterator[int]:
        """Ranks that a tensor-parallel group can have: inside a node."""
        inside, limit = self.cluster.devices_per_node, self.profile.split_limit
        for ranks in range(2, inside + 1):
            if limit and inside % ranks == 0 and limit % ranks == 0:
                yield ranks

    def stages(self, devices: int) -> Iterator[tuple[int, int]]:
        """Stages and micro-batches: as many as the batch divides into, from one to four per stage."""
        if not self.profile.pipeline_path:
            return
        inside, size = self.cluster.devices_per_node, self.profile.batch_size
        for stages in range(2, min(devices, len(self.profile.blocks)) + 1):
            whole_nodes = inside % stages == 0 or stages % inside == 0
            micro = max(m for m in range(1, min(4 * stages, size) + 1) if size % m == 0)
            if devices % stages == 0 and whole_nodes and micro >= stages:
                yield stages, micro

    def data_parallel(self, ranks: int) -> Plan:
        profile = self.profile
        sent = ddp_bytes(ranks, profile.trainable_bytes)
        hops = math.ceil(profile.trainable_bytes / _BUCKET_BYTES) * 2 * (ranks - 1)
        what = f"all-reduce of gradients, 2(n-1)/n x {bytes_text(profile.trainable_bytes)}"
        traffic = traffic_of(what, self.cluster, ranks, 1, sent, hops, beside=BACKWARD)
        return self._plan(
            "ddp" if ranks > 1 else "single",
            f"DDP {ranks}" if ranks > 1 else "single device",
            "speedkit_ddp" if ranks > 1 else "auto",
            self.whole,
            (traffic,),
            replicas=ranks,
        )

    def sharded(self, shards: int, copies: int) -> Plan:
        """FSDP2 over ``shards`` ranks, or HSDP: as many such groups as ``copies``."""
        traffic = self._shard_traffic(shards, 1, 0.0)
        if copies > 1:
            own = self.profile.trainable_bytes / shards
            hops = (len(self.profile.blocks) + 1) * 2 * (copies - 1)
            what = f"all-reduce of the own part of the gradients, 2(n-1)/n x {bytes_text(own)}"
            traffic += (traffic_of(what, self.cluster, copies, shards, ddp_bytes(copies, own), hops, beside=BACKWARD),)
        return self._plan(
            "hsdp" if copies > 1 else "fsdp",
            f"HSDP {shards} x {copies}" if copies > 1 else f"FSDP2 {shards}",
            self._model_parallel({"replicas": copies} if copies > 1 else {}, sharded=True),
            replace(self.whole, shards=shards, **self._while_sharded(0.0)),
            traffic,
            replicas=shards * copies,
        )

    def tensor_parallel(self, ranks: int, replicas: int) -> Plan:
        """Linear layers of the blocks over ``ranks`` ranks, what is left sharded over ``replicas`` such groups."""
        profile = self.profile
        part = sum(block.linear_bytes for block in profile.blocks) * (1 - 1 / ranks)  # on the other ranks
        output, count = max(block.output_bytes for block in profile.blocks), len(profile.blocks)
        sent, hops = tensor_parallel_bytes(ranks, count, output), 4 * count * 2 * (ranks - 1)
        what = f"4 all-reduces of activations in each of {count} blocks, 4 x {count} x 2(n-1)/n x {bytes_text(output)}"
        traffic: tuple[Traffic, ...] = (traffic_of(what, self.cluster, ranks, 1, sent, hops, beside=0),)
        copied = profile.weight_copy_bytes * (1 - part / profile.parameter_bytes)
        meanwhile: dict[str, float] = {"weight_copy_bytes": copied}
        if replicas > 1:
            traffic += self._shard_traffic(replicas, ranks, part)
            meanwhile = self._while_sharded(1 - 1 / ranks)
        elsewhere = self.activations_in_blocks * (1 - tensor_parallel_activation_share(ranks))
        return self._plan(
            "tensor",
            f"tensor parallel {ranks}" + (f" x FSDP2 {replicas}" if replicas > 1 else ""),
            self._model_parallel({"data_parallel": replicas, "tensor_parallel": ranks}, sharded=replicas > 1),
            replace(
                self.whole,
                parameter_bytes=profile.parameter_bytes - part,
                trainable_bytes=max(0.0, profile.trainable_bytes - part),
                activation_bytes=profile.activation_bytes - elsewhere,
                shards=replicas,
                **meanwhile,
            ),
            traffic,
            replicas=replicas,
            ranks=ranks,
            share=1 / ranks,
        )

    def pipeline(self, stages: int, replicas: int, micro_batches: int) -> Plan:
        """The fullest stage counts: the most blocks and all beside them. With 1F1B the first keeps p micro-batches."""
        profile = self.profile
        share = math.ceil(len(profile.blocks) / stages) / len(profile.blocks)
        parameters = profile.parameter_bytes - self.in_blocks * (1 - share)
        trainable = profile.trainable_bytes - self.trainable_in_blocks * (1 - share)
        activations = profile.activation_bytes - self.activations_in_blocks * (1 - share)
        output = max(block.output_bytes for block in profile.blocks)
        what = f"activations and their gradients, {min(stages - 1, 2)} x {bytes_text(output)}"
        sent, hops = pipeline_bytes(stages, output), 2 * (micro_batches + stages - 2)
        traffic: tuple[Traffic, ...] = (traffic_of(what, self.cluster, stages, 1, sent, hops, beside=0),)
        if replicas > 1:
            what = f"all-reduce of a stage's gradients, 2(n-1)/n x {bytes_text(trainable)}"
            sent, hops = ddp_bytes(replicas, trainable), 2 * (replicas - 1)
            traffic += (traffic_of(what, self.cluster, replicas, stages, sent, hops, beside=0),)
        arguments = {"attribute": profile.pipeline_path, "pipeline_size": stages, "microbatches": micro_batches}
        copies = profile.weight_copy_bytes * parameters / profile.parameter_bytes
        return self._plan(
            "pipeline",
            f"pipeline {stages}" + (f" x DDP {replicas}" if replicas > 1 else ""),
            {"class_path": "lightning_speedkit.PipelineStrategy", "init_args": arguments},
            replace(
                self.whole,
                parameter_bytes=parameters,
                trainable_bytes=trainable,
                activation_bytes=activations * min(stages, micro_batches) / micro_batches,
                weight_copy_bytes=copies * min(stages, micro_batches),  # autocast makes them in each micro-batch
            ),
            traffic,
            replicas=replicas,
            ranks=stages,
            stages=stages,
            share=share,
            micro_batches=micro_batches,
        )

    def _while_sharded(self, split: float) -> dict[str, float]:
        """What FSDP2 holds whole: what is beside the blocks, two blocks (one ahead), gradients of one and of the rest.

        ``split`` is the part of the blocks' linear layers that tensor parallel keeps elsewhere.
        """
        profile, size = self.profile, 0.5 if self.halved else 1.0
        blocks = [(b.parameter_bytes - split * b.linear_bytes, b.trainable_bytes) for b in profile.blocks]
        parameters, gradients = max(blocks, default=(0.0, 0.0))
        beside = profile.parameter_bytes - self.in_blocks
        trainable = profile.trainable_bytes - self.trainable_in_blocks
        gathered = size * (beside + 2 * parameters) + trainable + min(gradients, parameters)
        return {"gathered_bytes": gathered, "weight_copy_bytes": 0.0 if self.halved else profile.weight_copy_bytes}

    def _shard_traffic(self, ranks: int, stride: int, elsewhere: float) -> tuple[Traffic, ...]:
        """FSDP2's: blocks are gathered twice, the rest once, since it stays gathered; gradients are scattered.

        ``elsewhere`` bytes are kept by other ranks of the tensor-parallel group.
        """
        size, units = 0.5 if self.halved else 1.0, len(self.profile.blocks)
        blocks = size * (self.in_blocks - elsewhere)
        beside = size * (self.profile.parameter_bytes - self.in_blocks)
        gradients = max(0.0, self.profile.trainable_bytes - elsewhere)
        gathered = fsdp_bytes(ranks, blocks, 0) + fsdp_bytes(ranks, beside, 0, gathers=1)
        scattered = reduce_scatter_bytes(ranks, gradients)
        parts = [f"2 x {bytes_text(blocks)}"] if blocks else []
        parts += [bytes_text(beside)] if beside else []
        to_gather = f"parameters gathered, (n-1)/n x ({' + '.join(parts)})"
        to_scatter = f"gradients scattered, (n-1)/n x {bytes_text(gradients)}"
        gathers, scatters = (2 * units + 1) * (ranks - 1), (units + 1) * (ranks - 1)
        return (
            traffic_of(to_gather, self.cluster, ranks, stride, gathered, gathers, beside=1),
            traffic_of(to_scatter, self.cluster, ranks, stride, scattered, scatters, beside=BACKWARD),
        )

    def _model_parallel(self, arguments: dict[str, Any], sharded: bool) -> dict[str, Any]:
        if sharded and self.classes:
            arguments = {**arguments, "shard_class": self.classes}
        if sharded and self.halved:
            arguments = {**arguments, "gather_precision": "bf16"}
        return {"class_path": "lightning_speedkit.ModelParallelPlan", "init_args": arguments}

    def _plan(
        self,
        kind: str,
        name: str,
        strategy: str | dict[str, Any],
        memory: Memory,
        traffic: tuple[Traffic, ...],
        *,
        replicas: int,
        ranks: int = 1,
        stages: int = 1,
        micro_batches: int = 1,
        share: float = 1.0,
    ) -> Plan:
        """``share`` is the part of a batch's operations that the busiest of the replica's devices computes."""
        return priced_plan(
            Plan(
                kind=kind,
                name=name,
                strategy=strategy,
                devices=replicas * ranks,
                replicas=replicas,
                memory=memory,
                traffic=tuple(entry for entry in traffic if entry.sent_bytes),
                stages=stages,
                micro_batches=micro_batches,
            ),
            self.profile.flops * share,
            flops_per_second=self.cluster.flops_per_second[PRECISIONS[self.given.precision][2]],
            utilization=self.given.utilization,
        )
