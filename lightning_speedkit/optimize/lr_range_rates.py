"""The learning rates of an optimizer as one number: the rate of its leading group, from which the others follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LearningRates", "scale_schedule"]


class LearningRates:
    """Sets the rates of all parameter groups so that their ratios stay.

    The rate of a group is the highest that its schedule gives it: ``max_lr`` of one-cycle schedules, or else the
    ``initial_lr`` that a scheduler recorded, or else ``lr``. The leading group is the one with the highest rate. If
    all rates are 0, the groups are alike.

    Attributes:
        leading: The rate of the leading group.
        ratios: The rate of each group over it.

    Example:

        >>> weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        >>> optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.05}], lr=0.1)
        >>> LearningRates(optimizer).set(2.0)
        >>> [group["lr"] for group in optimizer.param_groups]
        [2.0, 1.0]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        rates = [_peak(group) for group in self._groups]
        self.leading = max(rates)
        self.ratios = tuple(rate / self.leading if self.leading > 0 else 1.0 for rate in rates)

    def set(self, rate: float) -> None:
        """Give the leading group that rate, and the others theirs."""
        for group, ratio in zip(self._groups, self.ratios, strict=True):
            _write(group, "lr", rate * ratio)


def scale_schedule(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any], rate: float) -> None:
    """Multiply the rates of an optimizer and of its schedules so that the leading group's highest is ``rate``.

    Fixed floors of a schedule (``eta_min``, ``min_lrs``) stay. If all rates are 0, ``lr`` is set.

    Example:

        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        >>> scale_schedule(optimizer, [scheduler], 0.4)
        >>> optimizer.step(), scheduler.step(), optimizer.param_groups[0]["lr"]
        (None, None, 0.2)
    """
    found = LearningRates(optimizer)
    if found.leading <= 0:
        found.set(rate)
        return
    parts = list(_with_parts(schedulers))
    factor = rate / max(found.leading, *(top for part in parts for top in getattr(part, "max_lrs", ())), 0.0)
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                _write(group, name, float(group[name]) * factor)
    for scheduler in parts:
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if isinstance(rates := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [float(value) * factor for value in rates])


def _with_parts(schedulers: Iterable[Any]) -> Iterable[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_parts(getattr(scheduler, "_schedulers", ()))


def _peak(group: dict[str, Any]) -> float:
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _write(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
