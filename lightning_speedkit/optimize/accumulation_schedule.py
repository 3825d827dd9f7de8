"""Schedules of the accumulation factor, as pure functions of where a run stands.

A schedule is ``{start: factor}``: each factor holds from its start, counted from 0, until the next start; before the
first start it is 1. Starts count epochs or optimizer steps. When it helps: to plan a learning-rate schedule, since
Lightning's own estimate of the number of steps takes the factor of the first epoch for all of them. It costs nothing.
Source: the behaviour of Lightning 2.6.6, where each epoch ends with a step.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["UNITS", "checked_schedule", "count_steps", "factor_at"]

UNITS = ("epoch", "step")


def checked_schedule(schedule: int | Mapping[int, int], name: str = "schedule") -> dict[int, int]:
    """A copy of the schedule; one number is a schedule from 0 on.

    Args:
        schedule: A factor of 1 or more, or ``{start: factor}`` with starts of 0 or more, in increasing order.
        name: What messages call it.

    Raises:
        ValueError: The schedule is empty, a number is too small, or the starts are not in order.
        TypeError: A start or factor is no whole number.

    >>> checked_schedule(4)
    {0: 4}
    """
    pairs = dict(schedule) if isinstance(schedule, Mapping) else {0: schedule}
    if not pairs:
        raise ValueError(f"{name}={{}} sets no factor; give one number, or {{start: factor}}, e.g. {{0: 1, 5: 4}}.")
    for start, factor in pairs.items():
        for what, value, least in (("start", start, 0), ("factor", factor, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={schedule!r}: the {what} {value!r} must be a whole number.")
            if value < least:
                raise ValueError(f"{name}={schedule!r}: the {what} {value} must be {least} or more.")
    if list(pairs) != sorted(pairs):
        raise ValueError(f"{name}={schedule!r}: the starts must increase; write {dict(sorted(pairs.items()))}.")
    return pairs


def factor_at(schedule: int | Mapping[int, int], position: int) -> int:
    """The factor that holds at an epoch or step: that of the last start at or before it, and 1 before the first.

    >>> [factor_at({1: 2, 3: 4}, epoch) for epoch in range(4)]
    [1, 2, 2, 4]
    """
    started = [factor for start, factor in checked_schedule(schedule).items() if start <= position]
    return started[-1] if started else 1


def count_steps(schedule: int | Mapping[int, int], batches_per_epoch: int, epochs: int, unit: str = "epoch") -> int:
    """How many optimizer steps a run takes: ``total_steps`` of a learning-rate schedule.

    Args:
        schedule: The factor, or ``{start: factor}``.
        batches_per_epoch: The micro-batches of each epoch on one rank, ``trainer.num_training_batches``.
        epochs: The number of epochs.
        unit: What the starts count: ``"epoch"`` or ``"step"`` (optimizer steps).

    Raises:
        ValueError: ``unit`` is none of these, or the schedule is not allowed.

    >>> count_steps({0: 1, 1: 4}, batches_per_epoch=6, epochs=3)  # 6, then twice a window of 4 and one of 2
    10
    >>> count_steps({0: 1, 2: 4}, batches_per_epoch=6, epochs=2, unit="step")  # 1 1 4, then 4 2
    5
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is unknown; use {' or '.join(map(repr, UNITS))}.")
    if unit == "epoch":
        return sum(-(-batches_per_epoch // factor_at(schedule, epoch)) for epoch in range(epochs))
    starts = list(checked_schedule(schedule))
    steps = 0
    for _ in range(epochs):
        left = batches_per_epoch
        while left > 0:
            factor = factor_at(schedule, steps)
            windows = -(-left // factor)
            change = min((start for start in starts if start > steps), default=steps + windows)
            windows = min(windows, change - steps)
            steps, left = steps + windows, left - windows * factor
    return steps
