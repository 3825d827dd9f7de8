"""Which strategy to train with, by arithmetic: for machines that are here, and for some that are not.

What it does: one step of the model is counted on fake tensors, every plan that the cluster allows is costed (memory
of the fullest device, bytes each rank sends, seconds of a step), and those that fit are ranked by seconds per batch.

When it helps: before a cluster is booked, or a strategy is tried out for hours. What it costs: seconds; no device is
touched. It is an estimate: kernels, file systems and stragglers are not in it. Compare, do not promise.

Source: the formulas and their papers are in :mod:`lightning_speedkit.parallel.cost_model`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from torch import Tensor, nn

from lightning_speedkit.errors import HardwareNeedError
from lightning_speedkit.facts.cluster import Cluster, read_cluster
from lightning_speedkit.parallel.suggest_candidates import (
    PIPELINE_PRECISIONS,
    SHARDED_PRECISIONS,
    Assumptions,
    possible_plans,
)
from lightning_speedkit.parallel.suggest_plan import Plan, bytes_text, seconds_text
from lightning_speedkit.parallel.suggest_profile import (
    PRECISIONS,
    EstimatedMemory,
    ModelProfile,
    profile_model,
    with_estimate,
)

__all__ = ["StrategyChoice", "suggest_strategy"]

_MOST_NODES = 128
_SIMPLEST = ("single", "ddp", "fsdp", "hsdp", "pipeline", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """The plans for a model on a cluster, the best first; those that do not fit last. ``str()`` is a table."""

    cluster: Cluster
    profile: ModelProfile
    plans: tuple[Plan, ...]
    assumptions: Assumptions
    usable_bytes: int

    @property
    def best(self) -> Plan:
        """The plan with the fewest seconds per batch of those that fit."""
        return self.plans[0]

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """What a Trainer or Lightning's YAML needs for the best plan."""
        nodes = max(1, self.best.devices // self.cluster.devices_per_node)
        sizes = {"devices": self.best.devices // nodes, "num_nodes": nodes}
        return {"strategy": self.best.strategy, **sizes, "precision": self.assumptions.precision}

    @property
    def reasons(self) -> tuple[str, ...]:
        """The arithmetic of the best plan, why the simpler ones were passed over, and what was not considered."""
        place = _SIMPLEST.index(self.best.kind)
        simpler = [plan for plan in self.plans[1:] if _SIMPLEST.index(plan.kind) < place]
        against = [f"not {plan.name}: {self._against(plan)}" for plan in simpler]
        return (*self.best.arithmetic(), *against, *self._not_considered(), *self._caveats())

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's fullest device has the memory."""
        return plan.memory_bytes <= self.usable_bytes

    def _against(self, plan: Plan) -> str:
        if not self.fits(plan):
            over = bytes_text(plan.memory_bytes - self.usable_bytes)
            return f"it needs {bytes_text(plan.memory_bytes)} per device, {over} too much"
        return f"{seconds_text(plan.seconds_per_batch)} per batch"

    def _not_considered(self) -> list[str]:
        profile, precision = self.profile, self.assumptions.precision
        if self.cluster.devices == 1:
            return []
        lines = []
        if precision not in SHARDED_PRECISIONS:
            lines.append(f"sharding and tensor parallel were not considered: not in {precision}")
        elif not profile.split_limit:
            why = "the blocks are not made of nn.Linear layers" if profile.blocks else "there are no repeated blocks"
            lines.append(f"tensor parallel was not considered: {why}")
        if precision not in PIPELINE_PRECISIONS or not profile.pipeline_path:
            why = profile.no_pipeline if precision in PIPELINE_PRECISIONS else f"not in {precision}"
            lines.append(f"pipeline was not considered: {why}")
        return lines

    def _caveats(self) -> list[str]:
        used, states = self.assumptions.utilization, self.assumptions.optimizer_states
        lines = [
            f"assumed, not measured: {used:.0%} of the peak FLOP/s, links at their stated speed, gradients sent beside "
            f"the backward, an optimizer that keeps {states:.3g} values per parameter"
        ]
        if self.best.replicas > 1:
            lines.append(f"a step trains on {self.best.replicas} batches: choose the learning rate for that")
        if self.best.kind == "tensor":
            lines.append("counted as if every nn.Linear of the blocks were split: see which ones the strategy splits")
        return lines

    def __str__(self) -> str:
        rows = [("plan", "devices", "memory per device", "sent per rank", "step", "per batch", "")]
        for plan in self.plans:
            over = "" if self.fits(plan) else f"{bytes_text(plan.memory_bytes - self.usable_bytes)} too much"
            seconds = (seconds_text(plan.seconds_per_step), seconds_text(plan.seconds_per_batch))
            sizes = (str(plan.devices), bytes_text(plan.memory_bytes), bytes_text(plan.sent_bytes))
            rows.append((plan.name, *sizes, *seconds, over))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        size = f"{self.profile.parameters / 1e6:,.1f} million parameters"
        usable = f"{bytes_text(self.usable_bytes)} of them counted on"
        head = f"{self.profile.name}, {size}, {self.assumptions.precision}, on {self.cluster.describe()}, {usable}"
        return "\n".join((head, *table, *self.reasons))


def suggest_strategy(
    module: nn.Module,
    batch: Any,
    hardware: Cluster | str | os.PathLike[str],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: str = "32-true",
    memory: EstimatedMemory | None = None,
    optimizer_states: float = 2,
    memory_margin: float = 0.1,
    utilization: float = 0.4,
) -> StrategyChoice:
    """The plans for training a module on a cluster, ranked by seconds per batch.

    Args:
        module: A LightningModule or a plain module, also on the meta device. It is not changed.
        batch: What one ``training_step`` gets; each data-parallel replica gets one of this size.
        hardware: A :class:`~lightning_speedkit.facts.cluster.Cluster`, or the path of its JSON file.
        loss: For a plain module; see :func:`~lightning_speedkit.parallel.suggest_profile.profile_model`.
        precision: Lightning's name of the precision.
        memory: What :func:`~lightning_speedkit.memory.estimate_memory` said of the same module, batch and precision.
            Its optimizer state and its activations, short-lived tensors included, are taken instead of the counted.
        optimizer_states: Values the optimizer keeps per parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        memory_margin: The part of each device's memory that is left to the allocator and to workspaces.
        utilization: The part of the peak FLOP/s that training reaches.

    Raises:
        FactsError: The JSON is not a description of a cluster.
        HardwareNeedError: No plan fits; the message says what is missing and the smallest cluster that would do.
        ValueError: The module cannot run with the batch, ``memory`` is of something else, or a number is not allowed.
        TypeError: ``hardware`` is neither a cluster nor a path, or a number is no number.

    >>> from lightning_speedkit.facts.cluster import Link
    >>> two = Cluster(nodes=1, devices_per_node=2, device_memory_bytes=10**9, flops_per_second={"32": 1e12},
    ...               within_node=Link(bytes_per_second=1e10))
    >>> choice = suggest_strategy(nn.Linear(100, 100), __import__("torch").zeros(4096, 100), two)
    >>> choice.best.name, choice.trainer_arguments["strategy"]
    ('DDP 2', 'speedkit_ddp')
    """
    _check_number("optimizer_states", optimizer_states, 0, 100)
    _check_number("memory_margin", memory_margin, 0, 0.99)
    _check_number("utilization", utilization, 0.001, 1)
    cluster = hardware if isinstance(hardware, Cluster) else _read(hardware)
    if precision in PRECISIONS and PRECISIONS[precision][2] not in cluster.flops_per_second:
        raise ValueError(
            f"precision={precision!r} needs flops_per_second[{PRECISIONS[precision][2]!r}] of the cluster, which has "
            f"{', '.join(map(repr, cluster.flops_per_second))}. Add it, or plan with another precision."
        )
    profile = profile_model(module, batch, loss=loss, precision=precision)
    if memory is not None:
        profile, optimizer_states = with_estimate(profile, memory, precision)
    given = Assumptions(precision=precision, optimizer_states=optimizer_states, utilization=utilization)
    usable = math.floor(cluster.device_memory_bytes * (1 - memory_margin))
    plans = sorted(possible_plans(profile, cluster, given), key=lambda plan: _rank(plan, usable))
    if plans[0].memory_bytes > usable:
        raise HardwareNeedError(_fits_nowhere(profile, cluster, given, plans[0], usable))
    return StrategyChoice(cluster=cluster, profile=profile, plans=tuple(plans), assumptions=given, usable_bytes=usable)


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not least <= float(value) <= most:
        raise ValueError(f"{name}={value!r} must be from {least} to {most}.")


def _read(hardware: str | os.PathLike[str]) -> Cluster:
    if not isinstance(hardware, (str, os.PathLike)):
        raise TypeError(f"hardware must be a Cluster or the path of its JSON file, got {type(hardware).__name__}.")
    return read_cluster(hardware)


def _rank(plan: Plan, usable: int) -> tuple[float, ...]:
    over = max(0, plan.memory_bytes - usable)
    return (over, float(f"{plan.seconds_per_batch:.3g}"), _SIMPLEST.index(plan.kind), plan.sent_bytes, plan.devices)


def _fits_nowhere(profile: ModelProfile, cluster: Cluster, given: Assumptions, nearest: Plan, usable: int) -> str:
    missing = nearest.memory_bytes - usable
    told = (
        f"{profile.name} fits nowhere on {cluster.describe()}: the plan that needs least, {nearest.name}, needs "
        f"{nearest.memory_bytes} bytes per device, and {usable} are usable: {missing} bytes "
        f"({bytes_text(missing)}) too few."
    )
    found = _smallest_cluster(profile, cluster, given, usable)
    if found is not None:
        larger, plan = found
        size = f"{larger.nodes} x {larger.devices_per_node} of these devices (nodes x devices per node)"
        return f"{told} The smallest cluster that would do: {size}, with {plan.name}. A smaller batch needs less too."
    floor = round(nearest.memory.total_bytes - nearest.memory.state_bytes)
    return (
        f"{told} Up to {_MOST_NODES} nodes of such devices do not help: {bytes_text(floor)} of it are activations, "
        "the batch and gathered parameters. Use a smaller batch, activation checkpointing, or devices with at least "
        f"{bytes_text(cluster.device_memory_bytes * nearest.memory_bytes / usable)} each."
    )


def _smallest_cluster(
    profile: ModelProfile, cluster: Cluster, given: Assumptions, usable: int
) -> tuple[Cluster, Plan] | None:
    """The fewest nodes of this kind on which a plan fits; where nodes have no link yet, that within a node."""
    link = cluster.between_nodes or cluster.within_node
    for nodes in range(cluster.nodes + 1, _MOST_NODES + 1):
        if link is None:
            return None
        larger = replace(cluster, nodes=nodes, between_nodes=link)
        fitting = [plan for plan in possible_plans(profile, larger, given) if plan.memory_bytes <= usable]
        if fitting:
            return larger, min(fitting, key=lambda plan: _rank(plan, usable))
    return None
