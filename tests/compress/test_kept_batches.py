"""Which batches of a fit are kept, as copies, and how many are planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_speedkit.compress.kept_batches import KeptBatches, planned_batches


@pytest.mark.parametrize(
    ("planned", "numbers"),
    [(11, [0, 3, 6]), (3, [0, 1, 2]), (2, [0, 1]), (float("inf"), [0, 1, 2])],
    ids=["spread", "all", "fewer", "endless"],
)
def test_batches_are_spread_over_what_is_planned(planned: float, numbers: list[int]) -> None:
    kept = KeptBatches(3)
    kept.begin(planned)
    for number in range(int(min(planned, 20))):
        kept.offer(number)
    assert kept.batches == numbers


def test_a_kept_batch_is_a_float32_copy() -> None:
    kept = KeptBatches(1)
    kept.begin(1)
    batch = {"x": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "y": torch.tensor([3])}
    kept.offer(batch)
    batch["x"].zero_()
    (copy,) = kept.batches
    assert (copy["x"].tolist(), copy["x"].dtype, copy["y"].dtype) == ([1.0, 2.0], torch.float32, torch.int64)
    kept.clear()
    assert kept.batches == []


def _trainer(**values: Any) -> Any:
    plain = {"num_training_batches": 100, "max_steps": -1, "global_step": 0, "accumulate_grad_batches": 1}
    return SimpleNamespace(**{**plain, "enable_validation": True, "num_val_batches": [], **values})


@pytest.mark.parametrize(
    ("values", "calibration", "planned"),
    [
        ({}, "train", 100),
        ({"max_steps": 10, "global_step": 4, "accumulate_grad_batches": 3}, "train", 18),  # 6 steps of 3 batches
        ({"max_steps": 500}, "train", 100),
        ({"num_training_batches": float("inf"), "max_steps": 7}, "train", 7),
        ({"num_val_batches": [4, 9]}, "val", 9),
        ({"num_val_batches": []}, "val", 0),
        ({"num_val_batches": [4], "enable_validation": False}, "val", 0),
    ],
)
def test_planned_batches(values: dict[str, Any], calibration: str, planned: float) -> None:
    assert planned_batches(_trainer(**values), calibration) == planned


def test_a_fit_that_is_resumed_near_the_end_of_its_epoch_keeps_a_batch() -> None:
    kept = KeptBatches(3)
    kept.begin(100)
    for number in (98, 99):
        kept.offer(number)
    assert kept.batches == [98]
    kept.begin(100)
    kept.offer(0)
    assert kept.batches == [0]
