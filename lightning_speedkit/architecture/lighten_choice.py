"""What a layer can be replaced by under a limit on its multiply-adds, and how far each choice is from its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_speedkit.architecture.depthwise import grouped_matrices
from lightning_speedkit.architecture.low_rank import squared_singular_values

__all__ = ["KINDS", "Choice", "choices_for", "largest_rank", "share_of"]

KINDS = ("depthwise", "grouped", "low-rank")
_GROUPS = (2, 4, 8, 16, 32)
_LANES = 8  # a rank of 16 or more is a multiple of it, as fast kernels want it


@dataclass(frozen=True, slots=True)
class Choice:
    """One replacement: ``share`` of the layer's multiply-adds, and ``error`` of its weights.

    ``error`` is the Frobenius norm of what is lost, relative to that of the weights: the square root of the share of
    the squared singular values that are left out.
    """

    kind: str
    groups: int
    rank: int
    share: float
    error: float


def choices_for(
    layer: nn.Module, kinds: Sequence[str], ratio: float, rank: int | None = None, energy: float | None = None
) -> list[Choice]:
    """The best of each kind that costs at most ``ratio`` of the layer, the nearest to its weights first.

    The rank is the given one, or the least that keeps the share ``energy`` of the squared singular values, or else the
    largest that ``ratio`` allows.

    >>> [(choice.kind, choice.rank) for choice in choices_for(nn.Conv2d(32, 64, 3), ["depthwise"], ratio=0.25)]
    [('depthwise', 1)]
    """
    weight = layer.get_parameter("weight").detach()
    best: dict[str, Choice] = {}
    for kind, groups in _forms(weight.shape, kinds):
        share = share_of(weight.shape, groups, 1)
        most = min(largest_rank(weight.shape, groups), math.floor(ratio / share + 1e-9))
        if most < 1 or (rank is not None and rank > most):
            continue
        told = squared_singular_values(grouped_matrices(weight, groups)).sum(0)
        total = float(told.sum())
        taken = rank if rank is not None else most - most % _LANES if groups == 1 and most >= 2 * _LANES else most
        if energy is not None:
            kept = torch.cumsum(told, 0) / (total or 1.0)
            taken = int((kept < min(energy, 1.0) - 1e-12).sum()) + 1
            if taken > most:
                continue
        lost = float(told[taken:].sum()) / total if total else 0.0
        choice = Choice(kind, groups, taken, share * taken, math.sqrt(max(0.0, lost)))
        if kind not in best or (choice.error, choice.share) < (best[kind].error, best[kind].share):
            best[kind] = choice
    return sorted(best.values(), key=lambda choice: (choice.error, choice.share))


def share_of(shape: Sequence[int], groups: int, rank: int) -> float:
    """The multiply-adds of a replacement as a share of those of a layer whose weight has this shape.

    MobileNet's figure for kernels of 3 by 3 and 64 outputs is 1/64 + 1/9:

    >>> round(share_of((64, 32, 3, 3), groups=32, rank=1), 4)
    0.1267
    """
    out, into, kernel = shape[0], shape[1], math.prod(shape[2:])
    return rank * (into * kernel + groups * out) / (into * kernel * out)


def largest_rank(shape: Sequence[int], groups: int) -> int:
    """The rank at which a replacement in that many groups computes the same as the layer.

    >>> largest_rank((64, 32, 3, 3), groups=32)
    9
    """
    return min(shape[0], shape[1] // groups * math.prod(shape[2:]))


def _forms(shape: Sequence[int], kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    spatial = math.prod(shape[2:]) > 1
    for kind in kinds:
        if kind == "low-rank":
            yield kind, 1
        elif kind == "depthwise" and spatial and shape[1] > 1:
            yield kind, shape[1]
        elif kind == "grouped" and spatial:
            yield from ((kind, groups) for groups in _GROUPS if groups < shape[1] and shape[1] % groups == 0)
