"""What a budget for backbones can limit, and what candidates can be ordered by."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_speedkit.errors import did_you_mean

__all__ = ["COSTS", "HIGHER_IS_BETTER", "LIMITS", "OBJECTIVES", "checked_budget", "checked_objective"]

COSTS = {  # how each is called in words, and its unit
    "parameters": ("parameters", ""),
    "flops": ("FLOPs of one image", ""),
    "latency_ms": ("latency of one image", "ms"),
    "batch_latency_ms": ("latency of a batch", "ms"),
    "inference_memory_mib": ("peak memory of inference", "MiB"),
    "training_memory_mib": ("peak memory of training", "MiB"),
    "training_samples_per_second": ("throughput of training", "samples/s"),
}
HIGHER_IS_BETTER = "training_samples_per_second"
OBJECTIVES = {
    "latency": "latency_ms",
    "batch-latency": "batch_latency_ms",
    "memory": "training_memory_mib",
    "inference-memory": "inference_memory_mib",
    "training": HIGHER_IS_BETTER,
    "parameters": "parameters",
    "flops": "flops",
}
LIMITS = {("min_" if name == HIGHER_IS_BETTER else "max_") + name: name for name in COSTS}


def checked_objective(objective: str) -> str:
    """The objective, if it is one.

    >>> checked_objective("memory")
    'memory'
    """
    if objective not in OBJECTIVES:
        hint = did_you_mean(objective, OBJECTIVES, most=1)
        raise ValueError(f"objective={objective!r} is not one of {', '.join(map(repr, OBJECTIVES))}.{hint}")
    return objective


def checked_budget(budget: Mapping[str, float] | None) -> dict[str, float]:
    """A copy of the limits, if each is known and a number above 0.

    >>> checked_budget({"max_latency_ms": 5})
    {'max_latency_ms': 5.0}
    """
    if budget is None:
        return {}
    if not isinstance(budget, Mapping):
        raise TypeError(f"budget={budget!r} must be a dict, such as {{'max_latency_ms': 5.0}}.")
    for limit, value in budget.items():
        if limit not in LIMITS:
            hint = did_you_mean(limit, LIMITS, most=1, cutoff=0.4)
            raise ValueError(f"budget: {limit!r} is no limit.{hint} There are {', '.join(LIMITS)}.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ValueError(f"budget: {limit}={value!r} must be a finite number above 0.")
    return {limit: float(value) for limit, value in budget.items()}
