"""How long each accumulation window of a run is: a schedule of factors, or of targets in samples.

What it does: it answers, for where a run stands, how many micro-batches or samples the next window takes, and how many
optimizer steps a run will have taken at its end. When it helps: a learning-rate schedule has to know that number before
the first step (Lightning takes the factor of the first epoch for all of them). What it costs: a look into a short table
per window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_speedkit.optimize.accumulation_schedule import UNITS, checked_schedule, count_steps, factor_at

__all__ = ["WindowPlan"]


@dataclass(slots=True)
class WindowPlan:
    """The lengths of a run's windows.

    Args:
        schedule: Micro-batches per window: a number, or ``{start: number}``.
        target: In place of it, samples per window over all ranks: a number, or ``{start: number}``.
        unit: What starts count: ``"epoch"`` or ``"step"``.

    Raises:
        ValueError: A schedule or the unit is not allowed.
        TypeError: A start or number is no whole number.

    Example:

        >>> plan = WindowPlan({0: 1, 2: 4}, unit="step")
        >>> [plan.factor(position) for position in range(4)]
        [1, 1, 4, 4]
        >>> plan.steps(batches=6, epochs=1)
        3
    """

    schedule: int | Mapping[int, int] = 1
    target: int | Mapping[int, int] | None = None
    unit: str = "epoch"
    _last: tuple[int, int] | None = field(default=None, init=False)  # a position and what holds there

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r} is unknown; use {' or '.join(map(repr, UNITS))}.")
        if self.target is not None and self.schedule != 1:
            raise ValueError(
                f"target_batch={self.target!r} and schedule={self.schedule!r} both say how long a window is. Keep one."
            )
        self.schedule = checked_schedule(self.schedule)
        if self.target is not None:
            self.target = checked_schedule(self.target, "target_batch")

    def accumulates(self) -> bool:
        """Whether any window may have more than one micro-batch."""
        assert isinstance(self.schedule, dict)
        return self.target is not None or max(self.schedule.values()) > 1

    def factor(self, position: int) -> int | None:
        """The micro-batches of a window that begins at this epoch or step; ``None`` if it has a target."""
        return None if self.target is not None else self.looked_up(position)

    def is_reached(self, samples: int, position: int) -> bool:
        """Whether a window with so many samples has reached its target."""
        return samples >= self.looked_up(position)

    def divisor(self, position: int, samples: int | Tensor, ranks: int) -> int:
        """What losses are to be divided by, so that their sum is about as large as one of them.

        Args:
            position: The epoch or step.
            samples: Those of the first micro-batch on this rank; a tensor is not read.
            ranks: The number of ranks.
        """
        if self.target is None:
            return self.looked_up(position)
        if isinstance(samples, Tensor) or not samples:
            return 1
        return max(math.ceil(self.looked_up(position) / (samples * ranks)), 1)

    def steps(self, batches: int, epochs: int, batch_size: int | None = None) -> int | None:
        """The optimizer steps of a run.

        Args:
            batches: Those of each epoch on one rank.
            epochs: The number of epochs.
            batch_size: The samples of each batch over all ranks.

        Returns:
            The number, or ``None`` if the windows have a target and the batch size is not known.
        """
        if self.target is None:
            return count_steps(self.schedule, batches, epochs, self.unit)
        if batch_size is None:
            return None
        assert isinstance(self.target, dict)
        factors = {start: math.ceil(target / batch_size) for start, target in self.target.items()}
        return count_steps(factors, batches, epochs, self.unit)

    def is_steady(self) -> bool:
        """Whether factors change between epochs only, if at all."""
        assert isinstance(self.schedule, dict)
        return self.target is None and (self.unit == "epoch" or (len(self.schedule) == 1 and 0 in self.schedule))

    def looked_up(self, position: int) -> int:
        """The factor or target that holds at this epoch or step."""
        if self._last is None or self._last[0] != position:
            self._last = position, factor_at(self.schedule if self.target is None else self.target, position)
        return self._last[1]
