"""What is saved of a place in an epoch, and where that leads, by numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.loader_position import LoaderPosition

ORDER = EpochOrder(samples=10, batch_size=2, world_size=2, seed=3)  # steps of 4, 4 and 2 samples


def place(position: LoaderPosition) -> tuple[int, int, int, int]:
    return position.epoch, position.start, position.before, position.given


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (1, 4), (2, 8), (3, 10)])
def test_the_state_after_so_many_batches(given: int, expected: int) -> None:
    position = LoaderPosition()
    position.begin(7)
    position.given = given
    assert position.state(ORDER) == {
        "version": 1, "epoch": 7, "position": expected, "samples": 10, "seed": 3, "shuffle": "none", "blocks": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(0, (7, 0, 0, 0)), (4, (7, 4, 1, 0)), (8, (7, 8, 2, 0)), (10, (8, 0, 0, 0)), (6, (7, 6, 2, 0))],
)
def test_where_a_state_leads(saved: int, expected: tuple[int, ...]) -> None:
    position = LoaderPosition()
    position.given = 1
    position.load(ORDER, {**position.state(ORDER), "epoch": 7, "position": saved})
    assert place(position) == expected
    assert position.turn == 1


def test_batches_after_a_resume_are_counted_from_there() -> None:
    position = LoaderPosition()
    position.load(ORDER, {**position.state(ORDER), "position": 4})
    position.given = 1
    assert position.state(ORDER)["position"] == 8
    position.given = 2
    assert position.state(ORDER)["position"] == 10


@pytest.mark.parametrize(("name", "value"), [("samples", 11), ("seed", 4), ("shuffle", "full"), ("blocks", 5)])
def test_only_within_an_epoch_must_the_order_be_the_same(name: str, value: Any) -> None:
    position = LoaderPosition()
    other = {**position.state(ORDER), name: value}
    position.load(ORDER, {**other, "position": 0})
    with pytest.raises(ValueError, match=rf"a loader with {name}={value!r}, this one has {getattr(ORDER, name, 0)!r}"):
        position.load(ORDER, {**other, "position": 4})
    assert position.turn == 1  # a state that is refused changes nothing


def test_blocks_of_another_store_are_another_order() -> None:
    orders = [
        EpochOrder(samples=10, batch_size=2, shuffle="blocks", block_firsts=np.array(firsts), window_blocks=1)
        for firsts in ([0, 5], [0, 4])
    ]
    position = LoaderPosition()
    state = {**position.state(orders[0]), "position": 4}
    position.load(orders[0], state)
    with pytest.raises(ValueError, match="blocks="):
        position.load(orders[1], state)


@pytest.mark.parametrize(
    ("state", "words"),
    [({}, "it lacks epoch, position, samples, seed, shuffle"), ({"epoch": -1}, "epoch must be at least 0"),
     ({"position": -4}, "position must be at least 0")],
)  # fmt: skip
def test_what_is_no_state(state: dict[str, int], words: str) -> None:
    position = LoaderPosition()
    with pytest.raises(ValueError, match=words):
        position.load(ORDER, {**position.state(ORDER), **state} if state else {})
