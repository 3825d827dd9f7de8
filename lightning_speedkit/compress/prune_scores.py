"""Which weights are pruned: counting, ranking and the cubic schedule, as functions of plain tensors.

All of it is exact: of ``n`` weights exactly ``round(sparsity * n)`` are marked, and of weights that score alike the
first ones in memory are taken, so every rank and every repetition marks the same.

Sources: Zhu and Gupta, To prune, or not to prune, 2017 (arXiv 1710.01878) for the schedule; Mishra et al.,
Accelerating sparse deep neural networks, 2021 (arXiv 2104.08378) for two of four.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["count_for", "mark_lowest", "mark_lowest_together", "mark_two_of_four", "sparsity_at"]


def sparsity_at(step: int, start: int, end: int, initial: float, target: float) -> float:
    """The share of weights that are zero after ``step`` optimizer steps, by the cubic schedule.

    It is ``initial`` up to ``start``, rises fast at first and then ever slower, and is ``target`` from ``end`` on.

    >>> [round(sparsity_at(step, 0, 10, 0.0, 0.8), 3) for step in (0, 1, 2, 5, 9, 10, 11)]
    [0.0, 0.217, 0.39, 0.7, 0.799, 0.8, 0.8]
    """
    if step >= end:
        return target
    if step <= start:
        return initial
    left = 1 - (step - start) / (end - start)
    return target + (initial - target) * left**3


def count_for(sparsity: float, weights: int) -> int:
    """How many of so many weights are zero at this sparsity: the nearest whole number.

    >>> count_for(0.5, 5), count_for(0.8, 10), count_for(0.0, 7)
    (3, 8, 0)
    """
    return int(sparsity * weights + 0.5)


def mark_lowest(scores: Tensor, count: int) -> Tensor:
    """A tensor of bool, true at the ``count`` lowest of ``scores``, which may have any shape.

    >>> mark_lowest(torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0]), 2)
    tensor([False,  True, False,  True, False])
    """
    flat = scores.reshape(-1)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= flat.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    if flat.is_cuda:  # where kthvalue is not deterministic, and slower
        limit = torch.topk(flat, count, largest=False, sorted=False).values.max()
    else:
        limit = torch.kthvalue(flat, count).values
    below = flat < limit
    equal = flat == limit
    missing = count - below.sum()
    return (below | (equal & (equal.cumsum(0) <= missing))).view(scores.shape)


def mark_lowest_together(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """As :func:`mark_lowest`, over several tensors that compete with each other.

    >>> mark_lowest_together([torch.tensor([3.0, 1.0]), torch.tensor([2.0])], 2)
    [tensor([False,  True]), tensor([True])]
    """
    if not scores:
        return []
    first = scores[0].device
    marked = mark_lowest(torch.cat([score.reshape(-1).to(first) for score in scores]), count)
    ends = itertools.accumulate(score.numel() for score in scores)
    parts = (marked[end - score.numel() : end] for end, score in zip(ends, scores, strict=True))
    return [part.view(score.shape).to(score.device) for part, score in zip(parts, scores, strict=True)]


def mark_two_of_four(scores: Tensor) -> Tensor:
    """True at the two lowest of each four consecutive scores along dimension 1, the inputs of a layer.

    Raises:
        ValueError: The size of that dimension is no multiple of 4.

    >>> mark_two_of_four(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([[False,  True, False,  True]])
    """
    if scores.shape[1] % 4:
        raise ValueError(f"Dimension 1 has {scores.shape[1]} entries; groups of four need a multiple of 4.")
    last = scores.movedim(1, -1)
    groups = last.reshape(-1, 4)
    lowest = groups.sort(dim=1, stable=True).indices[:, :2]
    marked = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, lowest, True)
    return marked.view(last.shape).movedim(-1, 1)
