"""What a batch is counted as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_speedkit.optimize.accumulation_count import checked_labels, counter_of, labels_in

LABELS = torch.tensor([[1, 2, -100, -100], [3, -100, 0, 5]])  # 5 labels; without the first column 3


@dataclass
class _Record:
    labels: Tensor


@pytest.mark.parametrize(
    ("batch", "labels"),
    [
        ({"labels": LABELS}, "labels"),
        ((torch.zeros(2), LABELS), 1),
        ((torch.zeros(2), LABELS), "1"),
        ((torch.zeros(2), LABELS), -1),
        ({"inputs": {"labels": LABELS}}, "inputs.labels"),
        ([{"x": 1}, {"y": LABELS}], "1.y"),
        ({"a.b": LABELS}, "a.b"),
        ({1: LABELS}, 1),
        (_Record(LABELS), "labels"),
        ({"deep": _Record(LABELS)}, "deep.labels"),
    ],
)
def test_labels_are_found_by_key_index_and_path(batch: Any, labels: str | int) -> None:
    assert labels_in(batch, labels).item() == 5
    assert labels_in(batch, labels, shifted=True).item() == 3
    assert labels_in(batch, labels, ignore_index=0).item() == 7


@pytest.mark.parametrize(
    ("batch", "labels", "message"),
    [
        ({"label": LABELS, "x": 1}, "labels", r"no 'labels'; it has 'label', 'x'. Did you mean 'label'\?"),
        ({}, "labels", "it has nothing"),
        ((LABELS,), 1, "a tuple of the batch has no '1'; it has 1 entries"),
        ((LABELS,), "labels", "no such entry"),
        (LABELS, "labels", "a Tensor of the batch has no 'labels'"),
        ({"a": {"b": LABELS}}, "a.c", "a dict of the batch has no 'c'; it has 'b'"),
    ],
)
def test_labels_that_are_not_there(batch: Any, labels: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labels_in(batch, labels)


def test_labels_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"must have a tensor at this place, and there is"):
        labels_in({"labels": [1, 2]})


def halves(batch: Any) -> int:
    return len(batch) // 2


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("samples", 2),
        ("batches", 1),
        ("labels", 5),
        ("shifted-labels", 3),
        (f"{__name__}:halves", 1),
        (halves, 1),
        ("torch:numel", 8),
        ("torch:Tensor.numel", 8),
    ],
)
def test_counters_by_name_path_and_function(count: Any, expected: int) -> None:
    batch: Any = LABELS if "numel" in str(count) else {"labels": LABELS, "other": LABELS}
    assert int(counter_of(count)(batch)) == expected


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("label", "Did you mean 'labels'"),
        ("tokens", "Did you mean 'labels'"),
        ("sample", "Did you mean 'samples'"),
        ("", "use|Use 'samples'"),
        (3, "count=3 is unknown"),
        (None, "count=None is unknown"),
        ("no_such_module:f", "names nothing that can be imported"),
        ("torch:no_such_function", "names nothing that can be imported"),
        ("torch:__version__", "cannot be called with a batch"),
    ],
)
def test_counters_that_are_not_known(count: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counter_of(count)


@pytest.mark.parametrize("said", [{"labels": "targets"}, {"labels": 1}, {"ignore_index": 0}])
@pytest.mark.parametrize("count", ["samples", "batches", halves])
def test_what_is_said_of_labels_that_are_not_counted_is_an_error(count: Any, said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"have no effect with count=.*Pass count='labels'"):
        counter_of(count, **said)


@pytest.mark.parametrize("count", ["samples", "batches", halves])
def test_a_place_of_labels_is_told_from_none_though_it_is_the_default(count: Any) -> None:
    assert checked_labels(count, None) == "labels"
    with pytest.raises(ValueError, match=r"labels='labels' has no effect with count=.*Pass count='labels'"):
        checked_labels(count, "labels")
    assert (checked_labels("labels", "labels"), checked_labels("shifted-labels", 1)) == ("labels", 1)
