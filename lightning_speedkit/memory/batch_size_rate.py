"""The learning rate that goes with another batch size: by the linear rule, or by the square root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["RULES", "rate_factor", "scale_rates"]

RULES = ("linear", "sqrt")


def rate_factor(rule: str | None, before: int, after: int) -> float:
    """By how much to multiply rates: linear (Goyal et al., arXiv 1706.02677), or by the root (Krizhevsky, 1404.5997).

    >>> rate_factor("linear", 8, 32), rate_factor("sqrt", 8, 32), rate_factor(None, 8, 32)
    (4.0, 2.0, 1.0)
    """
    ratio = after / before
    return {"linear": ratio, "sqrt": ratio**0.5}[rule] if rule is not None else 1.0


def scale_rates(optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of all parameter groups and of their schedules; fixed floors (``eta_min``) stay.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    >>> scale_rates([optimizer], [scheduler], 4.0)
    >>> optimizer.step(), scheduler.step(), optimizer.param_groups[0]["lr"]
    (None, None, 0.2)
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                if isinstance(found := group.get(name), torch.Tensor):
                    found.mul_(factor)
                elif found is not None:
                    group[name] = float(found) * factor
    for scheduler in _with_parts(schedulers):
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if isinstance(rates := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [rate * factor for rate in rates])


def _with_parts(schedulers: Iterable[Any]) -> Iterable[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_parts(getattr(scheduler, "_schedulers", ()))
