"""What a cluster is, as far as a choice of strategy depends on it, and as JSON: the machines need not be there.

A file says ``"schema": "cluster"`` and its version. A file of a newer version is refused, as is a key that is unknown:
its number would be passed over in silence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from lightning_speedkit.errors import FactsError, did_you_mean
from lightning_speedkit.facts.codec import write_json

__all__ = [
    "CLUSTER_SCHEMA_VERSION",
    "Cluster",
    "Link",
    "cluster_from_json",
    "cluster_to_json",
    "read_cluster",
    "write_cluster",
]

CLUSTER_SCHEMA_VERSION = 1
_NUMBER_FORMATS = ("64", "32", "bf16", "16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection: bytes per second in one direction, and the seconds until the first byte arrives.

    >>> Link(bytes_per_second=450e9, latency_seconds=3e-6).bytes_per_second
    450000000000.0
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_number("bytes_per_second", self.bytes_per_second)
        _check_number("latency_seconds", self.latency_seconds, zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
        nodes: How many machines.
        devices_per_node: Accelerators in each.
        device_memory_bytes: Memory of one accelerator.
        flops_per_second: What one accelerator computes at most, per format of numbers: ``"64"``, ``"32"``, ``"bf16"``
            and ``"16"``; those that are planned for.
        within_node: What one device sends to another of its node. ``None`` only with one device per node.
        between_nodes: What one **node** sends to another over all its adapters together. ``None`` only with one node.
        name: For people.

    Raises:
        ValueError: A number is not above 0, or a link is missing.
        TypeError: A number is no number.

    >>> nvlink, network = Link(bytes_per_second=450e9), Link(bytes_per_second=50e9)
    >>> h100 = Cluster(nodes=2, devices_per_node=8, device_memory_bytes=80 * 10**9, flops_per_second={"bf16": 989e12},
    ...                within_node=nvlink, between_nodes=network, name="two nodes")
    >>> h100.devices, cluster_from_json(cluster_to_json(h100)) == h100
    (16, True)
    """

    nodes: int
    devices_per_node: int
    device_memory_bytes: int
    flops_per_second: Mapping[str, float] = field(hash=False)
    within_node: Link | None = None
    between_nodes: Link | None = None
    name: str = "the cluster"

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "device_memory_bytes"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.flops_per_second, Mapping) or not self.flops_per_second:
            raise TypeError(
                f"flops_per_second={self.flops_per_second!r} must name what a device computes, as {{'bf16': 989e12}}."
            )
        for key, value in self.flops_per_second.items():
            if key not in _NUMBER_FORMATS:
                allowed = ", ".join(map(repr, _NUMBER_FORMATS))
                raise ValueError(f"flops_per_second has the key {key!r}; allowed are {allowed}.")
            _check_number(f"flops_per_second[{key!r}]", value)
        object.__setattr__(self, "flops_per_second", dict(self.flops_per_second))
        for name, number, what in (
            ("within_node", self.devices_per_node, "devices per node"),
            ("between_nodes", self.nodes, "nodes"),
        ):
            link = getattr(self, name)
            if link is not None and not isinstance(link, Link):
                raise TypeError(f"{name}={link!r} must be a Link.")
            if link is None and number > 1:
                raise ValueError(f"{name} is missing: with {number} {what} the speed of the link between them counts.")
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string.")

    @property
    def devices(self) -> int:
        """All accelerators."""
        return self.nodes * self.devices_per_node

    def describe(self) -> str:
        """One line for a person."""
        memory = f"{self.device_memory_bytes / 1e9:.1f} GB each"
        return f"{self.name}: {self.nodes} x {self.devices_per_node} devices (nodes x devices per node), {memory}"


def cluster_to_json(cluster: Cluster) -> str:
    """The cluster as a JSON text, which :func:`cluster_from_json` reads."""
    content = {"schema": "cluster", "schema_version": CLUSTER_SCHEMA_VERSION, **dataclasses.asdict(cluster)}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def cluster_from_json(text: str) -> Cluster:
    """The cluster that a JSON text describes.

    Raises:
        FactsError: It is no JSON, of another schema or a newer version, or a key or number is not allowed.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FactsError(f"This does not describe a cluster: it is not JSON ({error}).") from error
    if not isinstance(content, dict) or content.get("schema") != "cluster":
        got = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise FactsError(f'This does not describe a cluster: it needs "schema": "cluster", got {got!r}.')
    version = content.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise FactsError(f"The cluster has schema_version {version!r}; a whole number from 1 is allowed.")
    if version > CLUSTER_SCHEMA_VERSION:
        raise FactsError(
            f"The cluster has schema version {version}; this version of lightning_speedkit reads up to "
            f"{CLUSTER_SCHEMA_VERSION}. Read it with the version that wrote it, or a newer one."
        )
    fields = {name: value for name, value in content.items() if name not in ("schema", "schema_version")}
    try:
        for name in ("within_node", "between_nodes"):
            if fields.get(name) is not None:
                fields[name] = Link(**_known(fields[name], Link, name))
        return Cluster(**_known(fields, Cluster, "the cluster"))
    except (TypeError, ValueError) as error:
        raise FactsError(f"The description of the cluster cannot be used: {error}") from error


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster in a JSON file."""
    return cluster_from_json(Path(path).read_text(encoding="utf-8"))


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> Path:
    """Write the cluster to a JSON file, published by rename."""
    return write_json(cluster_to_json(cluster), path)


def _known(content: object, kind: type[Any], where: str) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    names = [entry.name for entry in fields]
    if not isinstance(content, dict):
        raise TypeError(f"{where} must be an object with {', '.join(names)}, got {content!r}.")
    for name in content:
        if name not in names:
            known = f"allowed are {', '.join(names)}.{did_you_mean(name, names)}"
            raise ValueError(f"{where} has the unknown key {name!r}; {known}")
    for entry in fields:
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and entry.name not in content:
            raise ValueError(f"{where} lacks {entry.name!r}.")
    return content


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if value < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")


def _check_number(name: str, value: object, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={value!r} must be {'0 or more' if zero else 'above 0'} and finite.")
