"""The structure of a batch, compared with torch's default_collate where the two agree."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_speedkit.data import collate_samples

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 2.0], torch.tensor([0.5, 2.0], dtype=torch.float32)),
        ([True, False], torch.tensor([True, False])),
        (["a", "b"], ["a", "b"]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([None, None], [None, None]),
        ([np.float64(0.1), np.float64(0.2)], torch.tensor([0.1, 0.2], dtype=torch.float64)),
        ([np.uint8(3)], torch.tensor([3], dtype=torch.uint8)),
        ([np.zeros((2, 0)), np.zeros((2, 0))], torch.zeros(2, 2, 0, dtype=torch.float64)),
        ([np.array("2020-01-01", "<M8[D]")], [np.array("2020-01-01", "<M8[D]")]),
        ([torch.tensor(1.5)], torch.tensor([1.5])),
        ([(), ()], ()),
        ([(1, "a"), (2, "b")], (torch.tensor([1, 2]), ["a", "b"])),
        ([[1, 2.0]], [torch.tensor([1]), torch.tensor([2.0])]),
        ([{"a": (1,)}, {"a": (2,)}], {"a": (torch.tensor([1, 2]),)}),
        ([Pair(1, 2), Pair(3, 4)], Pair(torch.tensor([1, 3]), torch.tensor([2, 4]))),
    ],
)
def test_batches(values: list[Any], expected: Any) -> None:
    found = collate_samples(values)
    assert type(found) is type(expected)
    _assert_same(found, expected)


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found == expected


def test_tensors_as_default_collate_stacks_them() -> None:
    samples = [{"x": torch.randn(3, 2), "y": [torch.randint(9, (4,))]} for _ in range(5)]
    _assert_same(collate_samples(samples), default_collate(samples))
    loader = DataLoader(samples, batch_size=5, num_workers=1, collate_fn=collate_samples)
    batch = next(iter(loader))
    _assert_same(batch, default_collate(samples))
    assert batch["x"].is_shared()


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], ValueError, r"\['x'\] has the shapes \[\(2,\), \(3,\)\]"),
        ([(1, [1, 2]), (1, [1])], ValueError, r"\[1\] has lists of different lengths"),
        ([(object(),)], TypeError, r"\[0\] is a object"),
    ],
)
def test_what_has_no_batch_form(values: list[Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        collate_samples(values)
