"""Samples are counted from shapes; a tensor without memory proves that no value is read."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_speedkit.measure import count_samples
from lightning_speedkit.measure.samples import tensors_in


@dataclass
class Pair:
    name: str
    image: torch.Tensor


Named = namedtuple("Named", ["x", "y"])
IMAGES = torch.empty(7, 3, 2, 2, device="meta")  # reading a value of it raises


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (IMAGES, 7),
        ((IMAGES, torch.zeros(5)), 7),
        ([torch.tensor(1.0), IMAGES], 7),
        ({"weight": 0.5, "deep": {"image": IMAGES}}, 7),
        (Pair("a", IMAGES), 7),
        (Named([], IMAGES), 7),
        ((["a", "b"], IMAGES), 7),
        (["a", "b"], 2),
        ([1, 2, 3], 3),
        (torch.zeros(0, 4), 0),
        (torch.tensor(1.0), 0),
        (None, 0),
        ("text", 0),
        ({}, 0),
        (Pair, 0),
    ],
)
def test_count(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


def test_tensors_come_in_the_order_of_the_batch_and_are_the_batchs_own() -> None:
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    batch = {"z": [a, "text", (b,)], "y": Pair("name", c), "x": None, "w": Pair, "v": {1: Named(d, iter([a]))}}
    assert [id(tensor) for tensor in tensors_in(batch)] == [id(tensor) for tensor in (a, b, c, d)]
