"""New gradients stay apart from old ones. Averaging over ranks is in the tests on two ranks."""

from __future__ import annotations

import torch
from torch import nn

from lightning_speedkit.optimize.micro_batch_gradients import NewGradients, add_gradients


def _two() -> tuple[nn.Parameter, nn.Parameter]:
    """One with a gradient of 1, one without."""
    old, fresh = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    old.sum().backward()
    return old, fresh


def test_new_gradients_are_added_in_place() -> None:
    old, fresh = _two()
    held = old.grad
    new = NewGradients([old, fresh])
    (3 * old + 4 * fresh).sum().backward()
    new.add()
    assert old.grad is held  # it may be a view into a bucket
    assert (old.grad.tolist(), fresh.grad.tolist()) == ([4, 4], [4, 4])  # type: ignore[union-attr]


def test_new_gradients_are_dropped() -> None:
    old, fresh = _two()
    new = NewGradients([old, fresh])
    (3 * old + 4 * fresh).sum().backward()
    new.restart()
    (5 * old).sum().backward()
    new.discard()
    assert (old.grad.tolist(), fresh.grad) == ([1, 1], None)  # type: ignore[union-attr]


def test_new_gradients_are_taken_away_and_added_scaled() -> None:
    old, fresh = _two()
    new = NewGradients([old, fresh])
    (3 * old + 4 * fresh).sum().backward()
    taken = new.detach()
    assert (old.grad.tolist(), fresh.grad) == ([1, 1], None)  # type: ignore[union-attr]
    old.grad.mul_(10)  # type: ignore[union-attr]  # as accumulation does before the last backward
    add_gradients(taken, torch.tensor(0.5, dtype=torch.float64))
    assert (old.grad.tolist(), fresh.grad.tolist()) == ([11.5, 11.5], [2, 2])  # type: ignore[union-attr]
    assert old.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_gradients_that_are_kept_apart_can_be_sparse() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    new = NewGradients(table.parameters())
    table(torch.tensor([2, 3])).sum().backward()
    new.add()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 2, 1, 0, 0]
