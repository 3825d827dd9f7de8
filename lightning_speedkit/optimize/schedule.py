"""Learning-rate schedules by name, counted in optimizer steps.

What it does: ``build_schedule("warmup-cosine", optimizer, total_steps)`` gives a scheduler whose rate is a pure
function of the share of the run that is done. When it helps: nearly every training ends lower with a rate that falls.
What it costs: a few microseconds per step.

A step is a step of the optimizer: with accumulation, Lightning's own ``frequency`` counts batches and acts on steps, so
that with a factor of 4 a frequency of 1 and of 2 are the same. ``frequency`` here is in steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lightning_speedkit.optimize import schedule_shapes as shapes
from lightning_speedkit.optimize.misplaced_arguments import names_options
from lightning_speedkit.optimize.optimizer_options import checked_name, checked_number, checked_options, defaults_of

__all__ = [
    "PLATEAU",
    "SCHEDULES",
    "build_schedule",
    "check_schedule",
    "is_endless",
    "scale_at",
    "schedule_names",
    "schedule_option_names",
]

PLATEAU = "reduce-on-plateau"
_OF_PLATEAU = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")


@dataclass(frozen=True, slots=True)
class _Shape:
    """A named shape: its function, the defaults of ``warmup`` and ``final`` (``None``: has none), and its options."""

    function: Callable[..., float]
    warmup: float
    final: float | None
    options: Mapping[str, float] = field(default_factory=dict)
    endless: bool = False  # needs no number of steps if the warmup is given in steps


SCHEDULES: Mapping[str, _Shape] = {
    "warmup-cosine": _Shape(shapes.warmup_cosine_at, 0.05, 0.0),
    "one-cycle": _Shape(shapes.one_cycle_at, 0.3, 4e-6, {"initial": 0.04}),
    "linear": _Shape(shapes.linear_at, 0.05, 0.0),
    "warmup-stable-decay": _Shape(shapes.warmup_stable_decay_at, 0.05, 0.0, {"decay": 0.2, "power": 0.5}),
    "inverse-sqrt": _Shape(shapes.inverse_sqrt_at, 0.05, None, endless=True),
    "constant": _Shape(shapes.constant_at, 0.0, None, endless=True),
}


def schedule_names() -> tuple[str, ...]:
    """The names that :func:`build_schedule` knows.

    >>> schedule_names()[:2]
    ('warmup-cosine', 'one-cycle')
    """
    return (*SCHEDULES, PLATEAU)


def schedule_option_names() -> set[str]:
    """What may stand in the options of one schedule or another.

    >>> sorted(schedule_option_names() & {"decay", "patience", "warmup"})
    ['decay', 'patience']
    """
    return {*_OF_PLATEAU, *(name for shape in SCHEDULES.values() for name in shape.options)}


def is_endless(name: str, warmup: int | float | None = None) -> bool:
    """Whether the schedule can be built without knowing how many steps the run will take.

    >>> is_endless("inverse-sqrt", warmup=1000), is_endless("linear")
    (True, False)
    """
    if name == PLATEAU:
        return True
    shape = SCHEDULES[checked_name("schedule", name, schedule_names())]
    return shape.endless and (isinstance(warmup, int) or (shape.warmup if warmup is None else warmup) == 0)


def scale_at(
    name: str,
    step: int,
    total_steps: int | None = None,
    *,
    warmup: int | float | None = None,
    final: float | None = None,
    frequency: int = 1,
    options: Mapping[str, Any] | None = None,
) -> float:
    """What the peak learning rate is multiplied with for one optimizer step. A pure function.

    Step k of n stands at a progress of (k + 1) / (n + 1): no step is taken before the rise or after the fall, that is
    with a rate of 0. After the last step the rate stays.

    Args:
        name: One of :func:`schedule_names`, without ``"reduce-on-plateau"``.
        step: Counted from 0.
        total_steps: How many optimizer steps the run takes.
        warmup: The length of the rise, in steps (an ``int``) or as a share of the run (a ``float`` below 1).
        final: What the peak rate is multiplied with at the end.
        frequency: The rate changes every so many optimizer steps.
        options: ``{"decay": 0.2, "power": 0.5}`` of ``"warmup-stable-decay"``, ``{"initial": 0.04}`` of
            ``"one-cycle"``.

    Raises:
        ValueError: A name, an option or a number is not allowed, ``total_steps`` is missing, or the rise takes longer.
        TypeError: An argument or an option is of the wrong kind.

    >>> [round(scale_at("linear", k, 5, warmup=2), 2) for k in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _scale(name, total_steps, warmup, final, frequency, options)(step)


@names_options("build_schedule(..., options={'NAME': ...})", schedule_option_names)
def build_schedule(
    name: str,
    optimizer: Optimizer,
    total_steps: int | None = None,
    *,
    warmup: int | float | None = None,
    final: float | None = None,
    frequency: int = 1,
    options: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """A scheduler of torch whose ``step()`` is to be called after each optimizer step; groups keep their ratio.

    ``"reduce-on-plateau"`` is no function of progress: it is torch's ``ReduceLROnPlateau``, takes the options of that,
    and its ``step(metric)`` is called once per validation. The other arguments are those of :func:`scale_at`.

    Raises:
        ValueError, TypeError: As :func:`scale_at`.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> schedule = build_schedule("warmup-cosine", optimizer, total_steps=100, warmup=10)
    >>> schedule.get_last_lr()
    [0.01]
    """
    if isinstance(name, Optimizer):
        raise TypeError(f"The name comes first: build_schedule({optimizer!r}, optimizer, ...).")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"The optimizer whose rate is to follow {name!r} is asked for; got {type(optimizer).__name__}.")
    if checked_name("schedule", name, schedule_names()) != PLATEAU:
        return LambdaLR(optimizer, _scale(name, total_steps, warmup, final, frequency, options))
    given = _plateau_options(total_steps, warmup, final, frequency, options)
    try:
        return ReduceLROnPlateau(optimizer, **given)
    except ValueError as error:
        raise ValueError(f"The schedule {name!r} refuses the options {given}: {error}") from error


def check_schedule(
    name: str,
    total_steps: int | None = None,
    *,
    warmup: int | float | None = None,
    final: float | None = None,
    frequency: int = 1,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Raise as :func:`build_schedule` does, before there is an optimizer, and a number of steps if it is not given.

    >>> check_schedule("linear", warmup=500)
    """
    if checked_name("schedule", name, schedule_names()) == PLATEAU:
        _plateau_options(total_steps, warmup, final, frequency, options)
    else:
        least = max(1, warmup) if isinstance(warmup, int) else 1
        _scale(name, least if total_steps is None else total_steps, warmup, final, frequency, options)


def _plateau_options(
    total_steps: int | None,
    warmup: int | float | None,
    final: float | None,
    frequency: int,
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    given = {"total_steps": total_steps, "warmup": warmup, "final": final, "frequency": frequency}
    idle = [key for key, value in given.items() if value != (1 if key == "frequency" else None)]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} cannot be given with {PLATEAU!r}, which follows a metric. Leave it out; the options "
            f"are {', '.join(_OF_PLATEAU)}."
        )
    _check_options(options)
    return checked_options(PLATEAU, options, defaults_of(ReduceLROnPlateau, _OF_PLATEAU))


def _check_options(options: Mapping[str, Any] | None) -> None:
    for key in options if isinstance(options, Mapping) else ():
        if key in ("warmup", "final", "frequency", "total_steps", "monitor"):
            raise ValueError(f"{key} is no option of a schedule but an argument of its own: give it beside options.")


def _scale(
    name: str,
    total_steps: int | None,
    warmup: int | float | None,
    final: float | None,
    frequency: int,
    options: Mapping[str, Any] | None,
) -> Callable[[int], float]:
    """The checked shape as a function of the step."""
    _check_options(options)
    if name == PLATEAU:
        raise ValueError(f"{PLATEAU!r} follows a metric and is no function of the step.")
    shape = SCHEDULES[checked_name("schedule", name, schedule_names())]
    given = {**shape.options, **checked_options(name, options, shape.options)}
    values = {key: checked_number(key, value, 0, math.inf if key == "power" else 1) for key, value in given.items()}
    if shape.final is not None:
        values["final"] = checked_number("final", shape.final if final is None else final, 0, 1)
    elif final is not None:
        raise ValueError(f"final has no effect on {name!r}; leave it out.")
    _check_whole("frequency", frequency)
    rise = shape.warmup if warmup is None else warmup
    if is_endless(name, warmup) and total_steps is None:
        total_steps = max(1, int(rise))  # only the ratio of step and warmup counts
    if total_steps is None or total_steps == math.inf:
        raise ValueError(
            f"total_steps={total_steps}: the schedule {name!r} needs the number of optimizer steps. Give it, or take "
            "'inverse-sqrt' or 'constant' with a warmup in steps."
        )
    _check_whole("total_steps", total_steps)
    end = total_steps + 1
    values["warmup"] = checked_number("warmup", rise, 0, above=name == "inverse-sqrt")  # which is 0 without a rise
    if isinstance(rise, int):
        if rise > total_steps and not shape.endless:
            raise ValueError(
                f"warmup={rise} steps are more than total_steps={total_steps}: the peak is never reached. Give fewer, "
                "or a share of the run such as 0.05."
            )
        values["warmup"] /= end
    elif rise >= 1:
        raise ValueError(f"warmup={rise!r} must be a share of the run below 1, or a whole number of steps.")

    def scale(step: int) -> float:
        progress = (step // frequency * frequency + 1) / end
        return shape.function(progress if shape.endless else min(progress, 1.0), **values)

    return scale


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number; got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more.")
