"""Counts of what lives, against things made here in known numbers."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_speedkit.memory.leak_monitor_census import Census, Grown, grown_between, kind_of_tensor, take_census


class Thing:
    pass


@functools.lru_cache(maxsize=50)
def _bounded(number: int) -> int:
    return number


@functools.cache
def _unbounded(number: int) -> int:
    return number


def test_a_census_counts_each_kind() -> None:
    before = take_census()
    things = [Thing() for _ in range(40)]
    tensors = [torch.zeros(3, 4567) for _ in range(5)]
    owner = SimpleNamespace(arrays={f"array {number}": np.zeros(2) for number in range(30)})  # not known to gc
    total: Any = torch.ones(2, 4567, requires_grad=True)
    for _ in range(25):
        total = total * 2
    for number in range(7):
        _unbounded(number)
    after = take_census()
    assert after.types[Thing] - before.types[Thing] == 40
    assert after.tensors["torch.float32 [3, 4567] on cpu"] == 5
    assert (after.lengths[id(things)], after.lengths[id(owner.arrays)]) == (40, 30)
    assert after.nodes["torch.float32 [2, 4567] on cpu from MulBackward0"] == 26  # and the one that gathers gradients
    assert after.caches[f"{__name__}._unbounded"] == (7, None)
    assert id(tensors) not in after.lengths  # too short to matter


def test_a_census_holds_nothing_and_counts_garbage() -> None:
    class Node:
        other: Any

    one, other = Node(), Node()
    one.other, other.other = other, one
    gone = weakref.ref(one)
    gc.collect()
    gc.disable()
    try:
        del one, other
        census = take_census()
    finally:
        gc.enable()
    assert gone() is None
    assert census.garbage >= 2


def test_a_tensor_without_a_shape_is_left_out() -> None:
    assert kind_of_tensor(torch.nn.parameter.UninitializedParameter()) is None
    assert kind_of_tensor(torch.zeros(2, 3, dtype=torch.int64)) == "torch.int64 [2, 3] on cpu"


def test_only_what_grew_each_time_by_one_in_two_steps_is_told() -> None:
    def counts(steady: int, once: int, slow: int) -> Census:
        return Census(lengths={1: steady, 2: once, 3: slow}, types=Counter({Thing: steady, set: once}))

    censuses = [counts(20, 20, 20), counts(40, 90, 29), counts(60, 90, 38)]
    found = grown_between(censuses, [100, 120, 140])
    assert [(one.kind, one.key, one.per_step) for one in found] == [("container", 1, 1.0), ("objects", Thing, 1.0)]


def test_tensors_are_estimated_by_their_shape_and_the_largest_go_first() -> None:
    small, large = "torch.int8 [10] on cpu", "torch.float64 [3, 5] on cuda:0 from AddBackward0"
    censuses = [Census(tensors=Counter({small: count, large: count})) for count in (0, 10, 20)]
    found = grown_between(censuses, [0, 10, 20])
    assert [(one.key, one.bytes_per_step - 512) for one in found] == [(large, 120.0), (small, 10.0)]


def test_a_cache_with_a_limit_is_told_apart_and_garbage_counts_between() -> None:
    censuses = [Census(caches={"f": (n, None), "g": (n, 500)}, garbage=2 * n) for n in (0, 10, 20)]
    found = {one.kind: one for one in grown_between(censuses, [0, 10, 20])}
    assert set(found) == {"cache", "filling cache", "garbage"}
    assert found["garbage"].per_step == 3.0  # (20 + 40) / 20: what the first found was there before
    assert isinstance(found["cache"], Grown)
    assert _bounded(3) == 3
