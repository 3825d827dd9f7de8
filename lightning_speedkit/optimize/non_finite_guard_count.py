"""Counts the steps that were skipped for a gradient that is not finite, tells of the first, and caps them.

What it does: what :class:`NonFiniteGuard` says and when it gives up. When it helps: a run that skips often is sick,
and has to hear of it. What it costs: nothing until a step is skipped; then, once, what ``explain_non_finite`` costs.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.optimize.non_finite_guard_origin import explain_non_finite

__all__ = ["SkipCount"]

_SCALE_SEARCH = 16  # skips in a row that bring a scale of 65536 down to 1


class SkipCount:
    """How many steps were skipped: in all (``total``), and ``in_a_row``.

    Args:
        max_in_a_row: More than this in a row are an error; 16 more under a gradient scaler.
        max_total: More than this in all are an error; ``None`` for no such limit.
        explain: Whether the first one is explained.
    """

    def __init__(self, max_in_a_row: int, max_total: int | None, explain: bool) -> None:
        self.max_in_a_row, self.max_total, self.explain = max_in_a_row, max_total, explain
        self.total = self.in_a_row = 0
        self.has_warned = False

    def add(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: tuple[Any, int], by_scaler: bool = False
    ) -> None:
        """Count the step of a batch, given with its number; warn or raise.

        To be called while the gradients are there. ``by_scaler``: the gradient scaler has skipped it, which is part of
        its work.
        """
        self.total += 1
        self.in_a_row += 1
        allowed = self.max_in_a_row + (_SCALE_SEARCH if by_scaler else 0)
        too_many = self.in_a_row > allowed or (self.max_total is not None and self.total > self.max_total)
        if not too_many and (self.has_warned or by_scaler):
            return
        self.has_warned = True
        origin = explain_non_finite(trainer, pl_module, *batch) if self.explain else None
        where = f" Where it came from: {origin}." if origin else ""
        if too_many:
            raise DivergenceError(
                f"{self.total} optimizer steps had a gradient that is not finite, {self.in_a_row} of them in "
                f"a row; allowed are max_in_a_row={allowed} and max_total={self.max_total}.{where} Look at that first; "
                "then at the learning rate, GradientClipping, or bf16 in place of fp16."
            )
        tell = rank_zero_warn if origin is None else warnings.warn  # a rank that has it tells it itself
        tell(
            f"The gradient of batch {batch[1]} in epoch {trainer.current_epoch} is not finite, and its step is skipped."
            f"{where} Further ones are counted in skipped_steps, which is logged, without a warning."
        )
