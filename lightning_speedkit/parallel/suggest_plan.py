"""One way to train on a cluster: what it needs, what it sends, how long it takes, and how a Trainer is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_speedkit.facts.cluster import Cluster
from lightning_speedkit.parallel.cost_model import ring_seconds

__all__ = ["Memory", "Plan", "Traffic", "bytes_text", "seconds_text", "traffic_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in one step to its group; ``rings`` groups share the link between nodes."""

    what: str
    ranks: int
    sent_bytes: float
    seconds: float
    between_nodes: bool
    rings: int
    hidden: bool

    def describe(self) -> str:
        """One line of arithmetic."""
        where = "between nodes" if self.between_nodes else "inside a node"
        shared = f", {self.rings} such groups sharing the link" if self.rings > 1 else ""
        beside = "beside the computing" if self.hidden else "while nothing is computed"
        sent = f"{bytes_text(self.sent_bytes)} from each rank"
        return f"{self.what}, n={self.ranks}: {sent} {where}{shared}, {seconds_text(self.seconds)} {beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest device: parameters, gradients and optimizer state; what sharding gathers; activations."""

    state_bytes: float
    gathered_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return round(self.state_bytes + self.gathered_bytes + self.activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train. ``replicas`` batches are computed per step; ``shards`` ranks share the state of one model.

    ``kind`` is ``"single"``, ``"ddp"``, ``"fsdp"``, ``"hsdp"``, ``"tensor"`` or ``"pipeline"``.
    """

    kind: str
    memory: Memory
    traffic: tuple[Traffic, ...]
    compute_seconds: float
    bubble: float
    seconds_per_step: float
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        return self.replicas * self.tensor * self.stages

    @property
    def memory_bytes(self) -> int:
        """Bytes on the fullest device."""
        return self.memory.total_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends per step, at most."""
        return sum(entry.sent_bytes for entry in self.traffic)

    @property
    def seconds_per_batch(self) -> float:
        """What plans are compared by: a step of several replicas trains on as many batches."""
        return self.seconds_per_step / self.replicas

    @property
    def name(self) -> str:
        """For people."""
        many = self.replicas > 1
        return {
            "single": "single device",
            "ddp": f"DDP {self.replicas}",
            "fsdp": f"FSDP2 {self.shards}",
            "hsdp": f"HSDP {self.shards} x {self.replicas // self.shards}",
            "tensor": f"tensor parallel {self.tensor}" + (f" x FSDP2 {self.replicas}" if many else ""),
            "pipeline": f"pipeline {self.stages}" + (f" x DDP {self.replicas}" if many else ""),
        }[self.kind]

    @property
    def strategy(self) -> str | dict[str, Any]:
        """The Trainer's ``strategy``: a name, or ``class_path`` and ``init_args`` as in Lightning's YAML."""
        if self.kind in ("single", "ddp"):
            return "auto" if self.kind == "single" else "speedkit_ddp"
        if self.kind == "hsdp":
            mesh = [self.replicas // self.shards, self.shards]
            arguments = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh}
            return {"class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": arguments}
        if self.kind == "pipeline":
            arguments = {"stages": self.stages, "micro_batches": self.micro_batches}
            return {"class_path": "lightning_speedkit.PipelineStrategy", "init_args": arguments}
        arguments = {"data_parallel_size": self.replicas, "tensor_parallel_size": self.tensor}
        return {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": arguments}

    @property
    def needs(self) -> str:
        """What has to be done to the module, beside giving the strategy to the Trainer; empty if nothing."""
        return {
            "single": "",
            "ddp": "",
            "fsdp": "configure_model calls fully_shard on each block and then on the whole model.",
            "hsdp": "configure_model wraps each block, or auto_wrap_policy={class of a block} is added. CUDA only.",
            "tensor": "configure_model applies parallelize_module to the linear layers of each block over the mesh "
            '"tensor_parallel", the first of a pair by columns and the second by rows'
            + (', then fully_shard over the mesh "data_parallel".' if self.replicas > 1 else "."),
            "pipeline": "The blocks are split by rank; every rank of one pipeline loads the same batches.",
        }[self.kind]

    def reasons(self) -> tuple[str, ...]:
        """The arithmetic, a line each."""
        memory = self.memory
        parts = f"{bytes_text(memory.state_bytes)} parameters, gradients and optimizer state"
        if memory.gathered_bytes:
            parts += f" + {bytes_text(memory.gathered_bytes)} gathered at once"
        parts += f" + {bytes_text(memory.activation_bytes)} activations and batch"
        lines = [f"memory: {parts} = {bytes_text(memory.total_bytes)} per device"]
        lines += [entry.describe() for entry in self.traffic]
        step = f"step: {seconds_text(self.compute_seconds)} computing"
        if self.bubble:
            step += f", {self.bubble:.0%} bubble ((p-1)/(m+p-1), p={self.stages}, m={self.micro_batches})"
        step += f" -> {seconds_text(self.seconds_per_step)} with what traffic adds, for {self.replicas} batches"
        return (*lines, f"{step}: {seconds_text(self.seconds_per_batch)} per batch")


def traffic_of(
    what: str, cluster: Cluster, ranks: int, stride: int, sent_bytes: float, hops: float, *, hidden: bool
) -> Traffic:
    """The traffic of a group of ``ranks`` that are ``stride`` apart, on the slowest link that it crosses."""
    inside = cluster.devices_per_node
    between = ranks > 1 and ranks * stride > inside
    rings = min(stride, inside) if between else 1
    links = [(cluster.between_nodes, rings)] if between else []
    if ranks > 1 and stride < inside:
        links.append((cluster.within_node, 1))
    seconds = max(
        (
            ring_seconds(
                sent_bytes,
                hops,
                bytes_per_second=link.bytes_per_second,
                latency_seconds=link.latency_seconds,
                rings=sharing,
            )
            for link, sharing in links
            if link is not None
        ),
        default=0.0,
    )
    return Traffic(
        what=what,
        ranks=ranks,
        sent_bytes=sent_bytes,
        seconds=seconds,
        between_nodes=between,
        rings=rings,
        hidden=hidden,
    )


def bytes_text(size: float) -> str:
    """Bytes in powers of ten, three digits.

    >>> bytes_text(120e9), bytes_text(1536), bytes_text(7)
    ('120 GB', '1.54 kB', '7 B')
    """
    return _scaled(size, 1.0, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def seconds_text(seconds: float) -> str:
    """Seconds, three digits.

    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(0)
    ('12.3 ms', '2.5 s', '0 s')
    """
    if seconds == 0 or seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return _scaled(seconds, 1e-9, ("ns", "us", "ms", "s"))


def _scaled(value: float, smallest: float, units: tuple[str, ...]) -> str:
    scaled, place = value / smallest, 0
    while float(f"{scaled:.3g}") >= 1000 and place < len(units) - 1:
        scaled, place = scaled / 1000, place + 1
    return f"{scaled:.3g} {units[place]}"
