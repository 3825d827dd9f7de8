"""The size of a bucket against the least of the cost that it is derived from, and a link that is measured."""

from __future__ import annotations

import pytest
import torch

from lightning_speedkit.parallel.bucket_size import measure_link, suggest_bucket_mb
from tests.two_ranks import on_two_ranks

MIB = 1 << 20


@pytest.mark.parametrize("latency", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("per_byte", [1e-11, 1e-9])
def test_no_other_size_costs_less(latency: float, per_byte: float) -> None:
    gradients = 500 * MIB

    def cost(mebibytes: float) -> float:
        return latency * gradients / (mebibytes * MIB) + per_byte * mebibytes * MIB

    best = suggest_bucket_mb(gradients, latency, per_byte)
    assert all(cost(best) <= cost(size) * (1 + 1e-9) for size in range(1, 501))


def test_the_limits() -> None:
    assert suggest_bucket_mb(500 * MIB, 0.0, 1e-9) == 1
    assert suggest_bucket_mb(500 * MIB, 1e-3, 0.0) == 500
    assert suggest_bucket_mb(10, 1.0, 1e-9) == 1
    assert suggest_bucket_mb(0, 0.0, 0.0) == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["latency_seconds", "seconds_per_byte", "gradient_bytes"])
def test_numbers_that_make_no_sense(name: str, value: float) -> None:
    arguments = {"gradient_bytes": 1, "latency_seconds": 1.0, "seconds_per_byte": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name}="):
        suggest_bucket_mb(**arguments)  # type: ignore[arg-type]


def _measure() -> tuple[float, float]:
    torch.distributed.init_process_group("gloo")
    try:
        return measure_link(torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()


def test_both_ranks_measure_the_same() -> None:
    first, second = on_two_ranks(_measure, timeout=60)
    assert first == second
    assert first[0] > 0 <= first[1]
