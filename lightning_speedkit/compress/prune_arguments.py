"""What ``Pruning`` checks: its arguments, whether this Trainer can be pruned in, and how long its run is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_speedkit.compress.choice import check_choice

__all__ = ["check_pruning", "check_sparsity", "planned_steps", "refuse_pruning", "resolved_steps", "run_last"]

_PATTERN_SPARSITY = 0.5


def check_pruning(
    *,
    scope: str,
    pattern: str | None,
    criterion: str = "magnitude",
    start: int | float = 0,
    end: int | float = 1,
    every: int | None = None,
    regrow: float = 0.0,
) -> None:
    """Raise for arguments that are not allowed, with what is allowed.

    Raises:
        ValueError: A name is unknown, a number out of its range, or two do not go together.
        TypeError: A number is none.
    """
    check_choice("scope", scope, ("global", "layer"))
    check_choice("criterion", criterion, ("magnitude", "movement"))
    if pattern is not None:
        check_choice("pattern", pattern, ("2:4",))
    _check_when("start", start)
    _check_when("end", end)
    if type(start) is type(end) and end < start:
        raise ValueError(f"end={end!r} is before start={start!r}; give an end that is not.")
    if criterion == "movement" and type(end) is int and end < 1:
        raise ValueError("criterion='movement' looks at steps, and end=0 is before the first. Give a later end.")
    if every is not None:
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every must be a whole number of steps, got {every!r}.")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}.")
    share = _number("regrow", regrow)
    if not 0 <= share < 1:
        raise ValueError(
            f"regrow={regrow!r} is not allowed; it is a share of the weights from 0 up to, and without, 1."
        )
    if share and pattern is not None:
        raise ValueError(f"regrow={regrow!r} does not go with pattern={pattern!r}, which lets no weight move freely.")


def check_sparsity(name: str, value: Any, pattern: str | None) -> float:
    """The sparsity as a float.

    Raises:
        ValueError: It is below 0, or 1 or more, or not what the pattern has.
        TypeError: It is no number.

    >>> check_sparsity("sparsity", 0, None)
    0.0
    """
    sparsity = _number(name, value)
    if not 0 <= sparsity < 1:
        percent = f" For {sparsity:g} % write {sparsity / 100:g}." if 1 < sparsity < 100 else ""
        raise ValueError(f"{name}={value!r} is not allowed; it is a share from 0 up to, and without, 1.{percent}")
    if pattern is not None and sparsity not in (0.0, _PATTERN_SPARSITY):
        raise ValueError(f"{name}={value!r} does not go with pattern={pattern!r}, which is a sparsity of 0.5.")
    return sparsity


def refuse_pruning(trainer: pl.Trainer, kind: type[Callback]) -> None:
    """Raise if this Trainer cannot be pruned in.

    Raises:
        MisconfigurationException: It cannot; the message names the way out.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if sum(isinstance(callback, kind) for callback in callbacks) > 1:
        raise MisconfigurationException("Two Pruning callbacks prune the same weights. Keep one of them.")
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise MisconfigurationException("ModelPruning and Pruning prune the same weights. Keep one of them.")
    if any(_cuts(callback) for callback in callbacks):
        raise MisconfigurationException(
            "StructuredPruning changes the shapes of the weights that Pruning has masks for. Use them in two runs, "
            "first StructuredPruning and then Pruning."
        )
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"Pruning does not work with {type(trainer.strategy).__name__}, where no process has the whole of the "
            "weights: it supports one device and DDP. Remove the callback, and use prune_weights() on the model from a "
            "checkpoint."
        )


def run_last(trainer: pl.Trainer, callback: Callback) -> bool:
    """Let Lightning call this callback after all others that do not save checkpoints.

    So gradients come to it after guards, and averages of weights are where they are put. Returns whether another
    callback averages weights.
    """
    others = [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]
    if len(others) < len(trainer.callbacks):  # type: ignore[attr-defined]
        place = next((i for i, other in enumerate(others) if isinstance(other, Checkpoint)), len(others))
        # a new list: the old one is being gone through
        trainer.callbacks = [*others[:place], callback, *others[place:]]  # type: ignore[attr-defined]
    return any(_averages(other) for other in others)


def planned_steps(trainer: pl.Trainer) -> int | None:
    """How many optimizer steps ``trainer.global_step`` will count in this run, if that is known."""
    if not trainer.lightning_module.automatic_optimization:  # the steps of a batch are those that the module takes
        return trainer.max_steps if trainer.max_steps > 0 else None
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # of windows whose length depends on the batches
        return None
    return int(total) if 0 <= total < math.inf else None


def resolved_steps(
    trainer: pl.Trainer, start: int | float, end: int | float, loaded: Mapping[str, Any]
) -> tuple[int, int]:
    """``start`` and ``end`` in steps; shares of the run are what they were in the run that is resumed.

    Raises:
        MisconfigurationException: A share is asked for and the length of the run is not known, or the end is first.
    """
    total = None
    if any(isinstance(value, float) for value in (start, end)) and not loaded:
        total = planned_steps(trainer)
        if total is None:
            raise MisconfigurationException(
                f"start={start!r} and end={end!r} are shares of the run, and the number of its optimizer steps is not "
                "known. Give both as whole numbers of steps, or the Trainer max_steps."
            )
    steps = [
        value if isinstance(value, int) else int(loaded[name]) if loaded else int(value * (total or 0) + 0.5)
        for name, value in (("start", start), ("end", end))
    ]
    if steps[1] < steps[0]:
        raise MisconfigurationException(
            f"Pruning would end before it starts: end={end!r} comes after {steps[1]} steps and start={start!r} after "
            f"{steps[0]}. Give both as steps, or both as shares of the run."
        )
    return steps[0], steps[1]


def _averages(callback: Callback) -> bool:
    lightning = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
    # of another area, which this one does not import
    return lightning or any(cls.__name__ == "AverageWeights" for cls in type(callback).__mro__)


def _cuts(callback: Callback) -> bool:
    named = any(cls.__name__ == "StructuredPruning" for cls in type(callback).__mro__)
    return named and bool(getattr(callback, "ratio", 0) or getattr(callback, "head_ratio", 0))


def _check_when(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a whole number of steps or a share of the run, got {value!r}.")
    if not value >= 0 or (isinstance(value, float) and not value <= 1):
        raise ValueError(
            f"{name}={value!r} is not allowed; it is a whole number of optimizer steps from 0 on, or a share of the "
            "run: a float from 0.0 to 1.0."
        )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)
