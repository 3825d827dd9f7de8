"""Which snapshot a run goes back to, by the number of the step that its weight holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize.snapshot_history import SnapshotHistory, snapshot_interval


class _Run:
    """Its weight is the number of steps that were taken."""

    def __init__(self, history: SnapshotHistory) -> None:
        self.net, self.history = nn.Linear(1, 1, bias=False), history
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        nn.init.zeros_(self.net.weight)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.history.take_if_due(self.net, self.optimizer)
            self.net.weight.grad = -torch.ones(1, 1)
            self.optimizer.step()
            self.history.count_step()

    def back(self) -> tuple[int, float]:
        return self.history.go_back(self.net, self.optimizer), self.net.weight.item()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("steps", "taken_back", "at"),
    [(1, 1, 0), (9, 9, 0), (10, 10, 0), (11, 11, 0), (19, 19, 0), (20, 10, 10), (21, 11, 10), (35, 15, 20)],
)
def test_the_newest_that_is_old_enough(steps: int, taken_back: int, at: int, on_disk: bool, tmp_path: Path) -> None:
    run = _Run(SnapshotHistory(10, str(tmp_path / "snapshots") if on_disk else None))
    run.go(steps)
    assert run.back() == (taken_back, at)
    assert run.back() == (0, at)  # a spike right after it
    run.go(12)
    assert run.back() == (12, at)
    run.go(25)
    assert run.back() == (15, at + 10)
    run.history.clear()
    assert not run.history.has_any
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        _Run(SnapshotHistory(1, str(tmp_path), rank)).go(2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"spike_guard_rank{rank}_{slot}.pt" for rank in range(2) for slot in "ab"]


@pytest.mark.parametrize(
    ("steps", "every"),
    [(1, 3), (399, 3), (400, 4), (2_599, 25), (5_000, 50), (10_000, 50), (math.inf, 50), (-1, 50)],
)
def test_snapshots_are_a_hundredth_of_the_run_apart(steps: float, every: int) -> None:
    assert snapshot_interval(steps) == every
