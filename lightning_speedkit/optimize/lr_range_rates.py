"""The learning rates of an optimizer as one number: the rate of its leading group, from which the others follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_speedkit.measure.learning_rates import parts_of, scale_rates

__all__ = ["LearningRates", "peak_rate", "peak_rates", "scale_schedule", "write_value"]


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
        rates = peak_rates(optimizer)
        self.leading = max(rates)
        self.ratios = tuple(rate / self.leading if self.leading > 0 else 1.0 for rate in rates)

    def set(self, rate: float) -> None:
        """Give the leading group that rate, and the others theirs."""
        for group, ratio in zip(self._groups, self.ratios, strict=True):
            write_value(group, "lr", rate * ratio)


def peak_rate(group: Mapping[str, Any]) -> float:
    """The highest rate of a parameter group: not ``lr`` where a scheduler was built, which has set that already.

    Example:

        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> _ = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        >>> optimizer.param_groups[0]["lr"], peak_rate(optimizer.param_groups[0])
        (0.0, 0.1)
    """
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def peak_rates(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any] = ()) -> list[float]:
    """The highest rate of each parameter group; ``CyclicLR`` has it in itself, and no group."""
    rates = [peak_rate(group) for group in optimizer.param_groups]
    for part in parts_of(schedulers):
        if isinstance(tops := getattr(part, "max_lrs", None), list):
            rates = [max(rate, float(top)) for rate, top in zip(rates, tops, strict=True)]
    return rates


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
    schedulers = list(schedulers)
    factor = rate / max(
        found.leading, *(top for part in parts_of(schedulers) for top in getattr(part, "max_lrs", ())), 0.0
    )
    scale_rates([optimizer], schedulers, factor)


def write_value(group: dict[str, Any], name: str, value: float) -> None:
    """Write a number into a parameter group, in place if it is a tensor there."""
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
