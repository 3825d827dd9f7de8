"""The norm of gradients that are spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["clip_by_norm", "clip_by_value", "global_norm"]


def global_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The 2-norm over all gradients together, the same on all ranks; all call it with the same parameters.

    A gradient may be whole, or a ``DTensor`` over any mesh: what several ranks hold counts once.

    Args:
        gradients: Of the parameters of one optimizer.
        device: Where the ranks exchange numbers.
    """
    squares: dict[tuple[Any, ...], Tensor] = {}
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for gradient in gradients:
        local: Tensor = gradient
        kind: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
                gradient = gradient.redistribute(placements=whole)
            local, mesh = gradient.to_local(), gradient.device_mesh
            split = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            kind = (mesh, *split)
            groups[kind] = [mesh.get_group(i) for i in split]
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(local.detach(), dtype=wide).square().to(device, torch.float64)
        squares[kind] = squares[kind] + square if kind in squares else square
    for kind, of_kind in groups.items():
        for group in of_kind:
            dist.all_reduce(squares[kind], group=group)
    return sum(squares.values(), torch.zeros((), dtype=torch.float64, device=device)).sqrt()


def clip_by_norm(parameters: Iterable[Tensor], limit: float, device: torch.device) -> Tensor:
    """Scale all gradients so that their common norm is at most the limit; returns the norm of before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(gradients, device)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for local in map(_local, gradients):
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Bring each number of the gradients into ``[-limit, limit]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-limit, limit)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
