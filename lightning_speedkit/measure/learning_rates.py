"""The learning rates of optimizers and of their schedules, multiplied together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["parts_of", "scale_rates"]


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
    for scheduler in parts_of(schedulers):
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if isinstance(rates := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [float(rate) * factor for rate in rates])


def parts_of(schedulers: Iterable[Any]) -> Iterable[Any]:
    """Schedulers, and those that they are made of.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> steps = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.LinearLR(optimizer)]
    >>> len(list(parts_of([torch.optim.lr_scheduler.ChainedScheduler(steps)])))
    3
    """
    for scheduler in schedulers:
        yield scheduler
        yield from parts_of(getattr(scheduler, "_schedulers", ()))
