"""What ranks tell each other, with a second rank that is made up; real ones are in test_accumulate_on_two_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from tests.optimize.line import Line, loader, trainer


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the other rank of two has."""
    holds: dict[str, Any] = {}

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert group == "ours"
        theirs = torch.as_tensor(holds["value"], dtype=tensor.dtype)
        tensor.copy_(torch.maximum(tensor, theirs) if op == dist.ReduceOp.MAX else tensor + theirs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return holds


TWO = DataRanks(size=2, rank=0, device=torch.device("cpu"), group="ours")


@pytest.mark.parametrize("number", [3, 3.0, torch.tensor(3), torch.tensor(3.0)])
def test_the_total_is_a_tensor_in_double_precision_and_the_number_is_left_alone(number: Any, other: Any) -> None:
    other["value"] = 2**40 + 1
    total = TWO.total(number)
    assert isinstance(total, Tensor)
    assert (total.dtype, total.item(), float(number)) == (torch.float64, 2**40 + 4, 3.0)


def test_means_maxima_and_flags(other: Any) -> None:
    other["value"] = [1.0, 5.0]
    tensor = torch.tensor([3.0, 1.0])
    assert TWO.mean(tensor) is tensor
    assert tensor.tolist() == [2.0, 3.0]
    other["value"] = 7.0
    assert (TWO.largest(2.0), TWO.largest(9.0)) == (7.0, 9.0)
    other["value"] = [0, 1, 0]
    assert TWO.any_holds([True, False, False]) == [True, True, False]


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_reduce")
    alone, number = DataRanks(), torch.tensor(3)
    assert alone.total(number) is number
    assert (alone.total(3), alone.largest(2.0), alone.any_holds([False, True])) == (3, 2.0, [False, True])


def test_the_ranks_of_a_run_on_one_device() -> None:
    run = trainer()
    run.fit(Line(), loader([torch.ones(1)]))
    assert DataRanks.of(run) == DataRanks(1, 0, torch.device("cpu"), None, False)
