"""Techniques around the optimizer step."""

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.accumulation_schedule import checked_schedule, count_steps, factor_at
from lightning_speedkit.optimize.accumulation_window import (
    AccumulationWindow,
    samples_in,
    scale_gradients,
    weigh_backward,
)

__all__ = [
    "AccumulationScheduler",
    "AccumulationWindow",
    "checked_schedule",
    "count_steps",
    "factor_at",
    "samples_in",
    "scale_gradients",
    "weigh_backward",
]
