"""Samples are counted from shapes; a tensor without memory proves that no value is read."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_speedkit.measure import count_samples


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
