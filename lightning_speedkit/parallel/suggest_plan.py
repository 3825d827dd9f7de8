"""One way to train on a cluster: what it needs, what it sends, how long it takes, and how a Trainer is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_speedkit.facts.cluster import Cluster
from lightning_speedkit.parallel.cost_model import (
    compute_seconds,
    model_state_bytes,
    pipeline_bubble,
    ring_seconds,
    step_seconds,
)

__all__ = ["BACKWARD", "Memory", "Plan", "Traffic", "bytes_text", "priced_plan", "seconds_text", "traffic_of"]

BACKWARD = 2 / 3
"""The part of a step's computing that is its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in one step to its group of ``ranks``; ``sum`` is the arithmetic of the seconds.

    ``beside`` is the part of the computing that can hide it: 0 for none, :data:`BACKWARD` for gradients, 1 for
    parameters that are gathered ahead.
    """

    what: str
    ranks: int
    sent_bytes: float
    seconds: float
    sum: str
    between_nodes: bool
    beside: float

    def describe(self) -> str:
        """One line of arithmetic."""
        where = "between nodes" if self.between_nodes else "inside a node"
        beside = {0: "while nothing is computed", BACKWARD: "beside the backward"}.get(
            self.beside, "beside the computing"
        )
        sent = f"{bytes_text(self.sent_bytes)} from each rank {where}"
        return f"{self.what}, n={self.ranks}: {sent}, {self.sum} = {seconds_text(self.seconds)} {beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest device, all at once: the most that a step can hold beside the workspaces of kernels.

    Parameters, gradients (as large as ``trainable_bytes``) and optimizer state are spread over ``shards`` ranks.
    ``gathered_bytes`` is what sharding holds whole meanwhile, ``weight_copy_bytes`` are autocast's 16-bit weights.
    """

    parameter_bytes: float
    trainable_bytes: float
    optimizer_states: float
    activation_bytes: float
    batch_bytes: float
    buffer_bytes: float = 0.0
    gathered_bytes: float = 0.0
    weight_copy_bytes: float = 0.0
    shards: int = 1

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state on one device."""
        states, shards = self.optimizer_states, self.shards
        return model_state_bytes(self.parameter_bytes, self.trainable_bytes, optimizer_states=states, shards=shards)

    @property
    def total_bytes(self) -> int:
        """The sum."""
        meanwhile = self.gathered_bytes + self.weight_copy_bytes + self.activation_bytes
        return round(self.state_bytes + meanwhile + self.batch_bytes + self.buffer_bytes)

    def describe(self) -> str:
        """One line of arithmetic; what is nothing is left out."""
        optimizer = self.optimizer_states * self.trainable_bytes
        state = (
            (self.parameter_bytes, "parameters"),
            (self.trainable_bytes, "gradients"),
            (optimizer, "optimizer state"),
        )
        shared = " + ".join(f"{bytes_text(size)} {name}" for size, name in state if size)
        rest = (
            (self.gathered_bytes, "gathered meanwhile"),
            (self.weight_copy_bytes, "16-bit copies of weights"),
            (self.activation_bytes, "activations"),
            (self.batch_bytes, "batch"),
            (self.buffer_bytes, "buffers"),
        )
        parts = [f"({shared}) / {self.shards}" if self.shards > 1 else shared]
        parts += [f"{bytes_text(size)} {name}" for size, name in rest if size]
        return f"memory: {' + '.join(parts)} = {bytes_text(self.total_bytes)} per device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train on ``devices`` devices. A step trains on ``replicas`` batches.

    ``kind`` is ``"single"``, ``"ddp"``, ``"fsdp"``, ``"hsdp"``, ``"tensor"`` or ``"pipeline"``; ``strategy`` the
    Trainer's: a name, or ``class_path`` and ``init_args`` as in Lightning's YAML. ``compute_sum`` and ``step_sum`` are
    the arithmetic of the seconds.
    """

    kind: str
    name: str
    strategy: str | dict[str, Any] = field(hash=False)
    devices: int
    replicas: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    stages: int = 1
    micro_batches: int = 1
    bubble: float = 0.0
    compute_seconds: float = 0.0
    seconds_per_step: float = 0.0
    compute_sum: str = ""
    step_sum: str = ""

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

    def arithmetic(self) -> tuple[str, ...]:
        """What the numbers come from, a line each."""
        step = f"step: {self.step_sum} = {seconds_text(self.seconds_per_step)}"
        if self.replicas > 1:
            step += f", for {self.replicas} batches: {seconds_text(self.seconds_per_batch)} per batch"
        lines = (self.memory.describe(), f"computing: {self.compute_sum}", *(t.describe() for t in self.traffic), step)
        return tuple(f"{self.name}: {line}" for line in lines)


def priced_plan(plan: Plan, flops: float, *, flops_per_second: float, utilization: float) -> Plan:
    """The plan with its seconds: ``flops`` on the busiest device, the bubble, and the traffic that does not hide."""
    compute = compute_seconds(flops, 1, flops_per_second=flops_per_second, utilization=utilization)
    bubble = pipeline_bubble(plan.stages, plan.micro_batches)
    alone = sum(entry.seconds for entry in plan.traffic if not entry.beside)
    seconds, terms = step_seconds(compute, alone, 0.0, hideable=0.0, bubble=bubble), ["0"]
    for part in sorted({entry.beside for entry in plan.traffic} - {0}):  # what hides in less hides in more, too
        hidden = sum(entry.seconds for entry in plan.traffic if 0 < entry.beside <= part)
        seconds = max(seconds, step_seconds(compute, alone, hidden, hideable=part, bubble=bubble))
        terms.append(f"{seconds_text(hidden)} - {part:.2g} x {seconds_text(compute)}")
    told = f"{seconds_text(compute)} computing"
    if bubble:
        told += f" / (1 - {bubble:.3g} idle), (p-1)/(m+p-1) with p={plan.stages} and m={plan.micro_batches},"
    if alone:
        told += f" + {seconds_text(alone)} of traffic by itself"
    if len(terms) > 1:
        told += f" + max({', '.join(terms)}) of traffic beside it"
    return replace(
        plan,
        compute_sum=f"{flops:.3g} FLOP / ({utilization:g} x {flops_per_second:.3g} FLOP/s) = {seconds_text(compute)}",
        compute_seconds=compute,
        bubble=bubble,
        step_sum=told,
        seconds_per_step=seconds,
    )


def traffic_of(
    what: str, cluster: Cluster, ranks: int, stride: int, sent_bytes: float, hops: float, *, beside: float
) -> Traffic:
    """The traffic of a group of ``ranks`` that are ``stride`` apart, on the slowest link that it crosses.

    Groups side by side share the link between nodes: as many as there are devices in a node, or ``stride``.
    """
    inside = cluster.devices_per_node
    between = ranks > 1 and ranks * stride > inside
    links = [(cluster.between_nodes, min(stride, inside))] if between else []
    if ranks > 1 and stride < inside:
        links.append((cluster.within_node, 1))
    seconds, told = 0.0, "nothing"
    for link, rings in links:
        assert link is not None
        speed, latency = link.bytes_per_second, link.latency_seconds
        taken = ring_seconds(sent_bytes, hops, bytes_per_second=speed, latency_seconds=latency, rings=rings)
        if taken > seconds:
            shared = f"{rings} groups x " if rings > 1 else ""
            waits = f" + {hops:.0f} messages x {seconds_text(latency)}" if latency else ""
            seconds, told = taken, f"{shared}{bytes_text(sent_bytes)} / {bytes_text(speed)}/s{waits}"
    return Traffic(
        what=what, ranks=ranks, sent_bytes=sent_bytes, seconds=seconds, sum=told, between_nodes=between, beside=beside
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
