"""The description of a cluster: what is read, and what is refused with a reason."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.errors import FactsError
from lightning_speedkit.facts.cluster import (
    Cluster,
    Link,
    cluster_from_json,
    cluster_to_json,
    read_cluster,
    write_cluster,
)

TWO = Cluster(
    nodes=2,
    devices_per_node=8,
    device_memory_bytes=80 * 10**9,
    flops_per_second={"bf16": 989e12, "32": 67e12},
    within_node=Link(bytes_per_second=450e9, latency_seconds=3e-6),
    between_nodes=Link(bytes_per_second=50e9),
)


def _changed(**changes: Any) -> str:
    content = {**json.loads(cluster_to_json(TWO)), **changes}
    return json.dumps({name: value for name, value in content.items() if value != "absent"})


def test_a_file_gives_back_the_cluster(tmp_path: Path) -> None:
    assert read_cluster(write_cluster(TWO, tmp_path / "new" / "two.json")) == TWO
    assert pickle.loads(pickle.dumps(TWO)) == TWO
    assert hash(TWO) == hash(cluster_from_json(cluster_to_json(TWO)))
    assert TWO.devices == 16
    assert TWO.describe() == "the cluster: 2 x 8 devices (nodes x devices per node), 80.0 GB each"


def test_the_callers_dict_is_copied() -> None:
    speeds = {"bf16": 1e12}
    one = Cluster(nodes=1, devices_per_node=1, device_memory_bytes=1, flops_per_second=speeds)
    speeds["bf16"] = 2e12
    assert one.flops_per_second == {"bf16": 1e12}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", 'needs "schema": "cluster", got \'list\''),
        (_changed(schema="run"), 'needs "schema": "cluster", got \'run\''),
        (_changed(schema="absent"), "got None"),
        (_changed(schema_version=2), "schema version 2; this version of lightning_speedkit reads up to 1"),
        (_changed(schema_version=0), "schema_version 0; a whole number from 1"),
        (_changed(schema_version=True), "schema_version True"),
        (_changed(node=3), "unknown key 'node'.*Did you mean 'nodes'"),
        (_changed(nodes="absent"), "the cluster lacks 'nodes'"),
        (_changed(nodes=0), "nodes=0 must be at least 1"),
        (_changed(nodes=-2), "nodes=-2 must be at least 1"),
        (_changed(nodes=1.5), "nodes=1.5 must be a whole number"),
        (_changed(device_memory_bytes=True), "device_memory_bytes=True must be a whole number"),
        (_changed(flops_per_second={"bf16": 0}), r"flops_per_second\['bf16'\]=0 must be above 0 and finite"),
        (_changed(flops_per_second={"fp8": 1}), "has the key 'fp8'; allowed are '64', '32', 'bf16', '16'"),
        (_changed(flops_per_second={}), "must name what a device computes"),
        (_changed(within_node={"bytes_per_second": -1}), "bytes_per_second=-1 must be above 0"),
        (_changed(within_node={"bytes_per_second": 1, "latency_seconds": -1}), "latency_seconds=-1 must be 0 or more"),
        (_changed(within_node={"bytes_per_second": "1"}), "bytes_per_second='1' must be a number"),
        (_changed(within_node={"latency_seconds": 1}), "within_node lacks 'bytes_per_second'"),
        (_changed(within_node=5), "within_node must be an object with bytes_per_second"),
        (_changed(within_node=None), "within_node is missing: with 8 devices per node"),
        (_changed(between_nodes=None), "between_nodes is missing: with 2 nodes"),
        (_changed(name=5), "name=5 must be a string"),
        (_changed(flops_per_second={"32": 1}).replace('"32": 1', '"32": Infinity'), "must be above 0 and finite"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(FactsError, match=message):
        cluster_from_json(text)


def test_a_link_must_be_a_link() -> None:
    with pytest.raises(TypeError, match="within_node=5 must be a Link"):
        Cluster(
            nodes=1,
            devices_per_node=1,
            device_memory_bytes=1,
            flops_per_second={"32": 1},
            within_node=5,  # type: ignore[arg-type]
        )
