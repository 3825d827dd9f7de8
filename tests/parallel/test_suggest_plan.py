"""A plan's numbers and its lines, against sums by hand."""

from __future__ import annotations

import pytest

from lightning_speedkit.facts.cluster import Cluster, Link
from lightning_speedkit.parallel.suggest_plan import (
    BACKWARD,
    Memory,
    Plan,
    bytes_text,
    priced_plan,
    seconds_text,
    traffic_of,
)

TWO_NODES = Cluster(
    nodes=2,
    devices_per_node=4,
    device_memory_bytes=10**10,
    flops_per_second={"32": 1e12},
    within_node=Link(bytes_per_second=100e9, latency_seconds=1e-3),
    between_nodes=Link(bytes_per_second=10e9),
)
MEMORY = Memory(parameter_bytes=4e9, trainable_bytes=2e9, optimizer_states=2, activation_bytes=1e9, batch_bytes=1e6)


def test_memory_is_the_sum_of_its_parts() -> None:
    assert MEMORY.state_bytes == 10e9
    assert MEMORY.total_bytes == 11_001_000_000
    assert MEMORY.describe() == (
        "memory: 4 GB parameters + 2 GB gradients + 4 GB optimizer state + 1 GB activations + 1 MB batch "
        "= 11 GB per device"
    )
    sharded = Memory(
        parameter_bytes=8e9,
        trainable_bytes=8e9,
        optimizer_states=0,
        activation_bytes=1e9,
        batch_bytes=0,
        gathered_bytes=3e9,
        weight_copy_bytes=2e9,
        buffer_bytes=5e8,
        shards=4,
    )
    assert sharded.total_bytes == 4e9 + 6.5e9
    assert "(8 GB parameters + 8 GB gradients) / 4 + 3 GB gathered meanwhile" in sharded.describe()


@pytest.mark.parametrize(
    ("ranks", "stride", "seconds", "told"),
    [
        (4, 1, 0.1 + 6e-3, "10 GB / 100 GB/s + 6 messages x 1 ms"),  # inside a node
        (8, 1, 1.0, "10 GB / 10 GB/s"),  # one ring over all devices: 10 GB leave a node
        (2, 4, 4.0, "4 groups x 10 GB / 10 GB/s"),  # each device with its like in the other node
        (4, 2, 2.0, "2 groups x 10 GB / 10 GB/s"),
        (1, 1, 0.0, "nothing"),
    ],
)
def test_traffic_takes_the_time_of_the_slowest_link_it_crosses(
    ranks: int, stride: int, seconds: float, told: str
) -> None:
    traffic = traffic_of("sum", TWO_NODES, ranks, stride, 10e9, 6, beside=BACKWARD)
    assert traffic.seconds == pytest.approx(seconds)
    assert traffic.sum == told
    assert traffic.between_nodes == (ranks * stride > 4)
    where = "between nodes" if traffic.between_nodes else "inside a node"
    head = f"sum, n={ranks}: 10 GB from each rank {where}, {told} = "
    assert traffic.describe() == f"{head}{seconds_text(seconds)} beside the backward"


def _plan(**changes: object) -> Plan:
    arguments = {"kind": "pipeline", "name": "P", "strategy": "x", "devices": 8, "replicas": 2, "memory": MEMORY}
    return Plan(**{**arguments, "traffic": (), **changes})  # type: ignore[arg-type]


def test_seconds_by_hand() -> None:
    alone = traffic_of("alone", TWO_NODES, 8, 1, 5e9, 0, beside=0)  # 0.5 s
    gradients = traffic_of("gradients", TWO_NODES, 8, 1, 18e9, 0, beside=BACKWARD)  # 1.8 s
    ahead = traffic_of("parameters", TWO_NODES, 8, 1, 2e9, 0, beside=1)  # 0.2 s
    plan = _plan(traffic=(alone, gradients, ahead), stages=4, micro_batches=5)
    priced = priced_plan(plan, 6e11, flops_per_second=1e12, utilization=0.4)
    assert priced.compute_seconds == pytest.approx(1.5)
    assert priced.bubble == 3 / 8
    assert priced.seconds_per_step == pytest.approx(1.5 / (5 / 8) + 0.5 + (1.8 - 1.0))
    assert priced.seconds_per_batch == pytest.approx(priced.seconds_per_step / 2)
    assert priced.sent_bytes == 25e9
    assert priced.memory_bytes == MEMORY.total_bytes
    assert priced.arithmetic()[1] == "P: computing: 6e+11 FLOP / (0.4 x 1e+12 FLOP/s) = 1.5 s"
    assert priced.arithmetic()[-1] == (
        "P: step: 1.5 s computing / (1 - 0.375 idle), (p-1)/(m+p-1) with p=4 and m=5, + 500 ms of traffic by itself "
        "+ max(0, 1.8 s - 0.67 x 1.5 s, 2 s - 1 x 1.5 s) of traffic beside it = 3.7 s, for 2 batches: 1.85 s per batch"
    )
    assert alone.describe().endswith("while nothing is computed")
    assert ahead.describe().endswith("beside the computing")
    longer = priced_plan(
        _plan(traffic=(gradients, ahead, ahead, ahead, ahead, ahead)), 6e11, flops_per_second=4e11, utilization=1
    )
    assert longer.seconds_per_step == pytest.approx(1.5 + (1.8 + 1.0 - 1.5))


def test_a_plan_without_traffic_only_computes() -> None:
    priced = priced_plan(_plan(replicas=1), 8e11, flops_per_second=1e12, utilization=0.8)
    assert priced.seconds_per_step == priced.compute_seconds == 1.0
    assert priced.arithmetic()[-1] == "P: step: 1 s computing = 1 s"


def test_texts() -> None:
    assert (bytes_text(0), bytes_text(999.6), bytes_text(3.2e12)) == ("0 B", "1 kB", "3.2 TB")
    assert (seconds_text(2e-7), seconds_text(0.9996), seconds_text(5000)) == ("200 ns", "1 s", "5000 s")
