"""The probe copies the rows that it says it copies, and counts their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_speedkit.measure import memory_copy as module
from lightning_speedkit.measure.memory_copy import measure_memory_copy


class _Clock:
    """A second for each batch that is copied."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What ``np.take`` was asked to do, each taking a second; it is really done."""
    clock, seen = _Clock(), []
    original = np.take

    def take(source: Any, order: Any, **arguments: Any) -> Any:
        clock.now += 1.0
        seen.append((source.shape, order.copy(), arguments["out"]))
        return original(source, order, **arguments)

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.np, "take", take)
    return seen


def test_bytes_per_second_by_hand(takes: list[tuple[Any, ...]]) -> None:
    assert measure_memory_copy(4096, rows=100, source_bytes=1 << 20, seconds=40.0) == 4096 * 100
    shapes, orders, targets = zip(*takes, strict=True)
    assert set(shapes) == {(256, 4096)}
    assert len({id(target) for target in targets}) == 1  # one buffer, used again
    assert {len(order) for order in orders} == {100}
    assert all(0 <= order.min() <= order.max() < 256 for order in orders)
    assert len(np.unique(np.concatenate(orders))) > 200  # from everywhere


def test_short_batches_are_made_longer(takes: list[tuple[Any, ...]]) -> None:
    measure_memory_copy(8, rows=1, source_bytes=1 << 16, seconds=5.0)
    assert takes[0][2].nbytes == 1 << 18


def test_a_row_larger_than_the_source_has_sixteen_places(takes: list[tuple[Any, ...]]) -> None:
    measure_memory_copy(1 << 20, rows=2, source_bytes=1, seconds=5.0)
    assert takes[0][0] == (16, 1 << 20)


def test_the_fastest_of_several_measurements_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1.0, 5.0, 2.0, 4.0, 3.0])
    monkeypatch.setattr(module, "_rate", lambda *arguments: next(rates))
    assert measure_memory_copy(8) == 5.0


def test_the_copy_is_right() -> None:
    source = np.arange(40, dtype=np.uint8).reshape(10, 4)
    target = np.zeros((3, 4), dtype=np.uint8)
    module._rate(source, target, [np.array([9, 0, 4])], seconds=1e-9)
    assert target.tolist() == [[36, 37, 38, 39], [0, 1, 2, 3], [16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"row_bytes": 0}, ValueError),
        ({"row_bytes": 1.5}, TypeError),
        ({"row_bytes": 8, "rows": True}, TypeError),
        ({"row_bytes": 8, "source_bytes": -1}, ValueError),
        ({"row_bytes": 8, "seconds": 0}, ValueError),
        ({"row_bytes": 8, "seconds": float("nan")}, ValueError),
        ({"row_bytes": 8, "seconds": "1"}, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=list(arguments)[-1]):
        measure_memory_copy(**arguments)
