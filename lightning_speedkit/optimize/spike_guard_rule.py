"""Tells whether a loss is a spike, from the losses before it.

What it does: a loss that is not finite is a spike. Any other is one if it is above the last loss, far above the mean of
the last few, and out of the spread of the last 128. The spread is what leaves alone a run that nears a loss of 0, whose
batches differ by more than their mean: without it, 2 to 6 of the 370 steps of each clean run of ``benchmarks.spikes``
are taken for spikes; with it, none. What it costs: a few operations on ten numbers; the spread is computed only where
the other rules are met.

Sources: Lightning's ``SpikeDetection`` for the mean (a window of 10, 2.0 times the mean above the mean, and worse than
the last loss); OLMo-core's ``SkipStepOptimizer`` for the spread (6 standard deviations above the mean of the last 128
losses).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["SPREAD_WINDOW", "is_spike"]

SPREAD_WINDOW = 128  # OLMo-core: rolling_interval_length


def is_spike(
    loss: float,
    recent: Sequence[float],
    threshold: float = 2.0,
    margin: float = 0.0,
    window: int = 10,
    deviations: float = 6.0,
) -> bool:
    """Whether a loss is not finite, or far above the recent ones.

    Args:
        loss: The loss in question.
        recent: Those before it, the last one last; none of them spikes. If they are fewer than ``window``, only a loss
            that is not finite is a spike.
        threshold: How far above the mean of the last ``window``, in units of that (absolute) mean.
        margin: How far above that mean at least.
        window: How many losses this mean is of.
        deviations: How far above the mean of the last 128, in units of their standard deviation; 0 for no such rule.

    >>> calm = [1.0, 0.9, 1.1, 1.0, 1.0, 0.9, 1.1, 1.0, 1.0, 1.0]
    >>> is_spike(2.9, calm), is_spike(3.1, calm), is_spike(math.nan, [])
    (False, True, True)
    >>> noisy = [0.2, 0.01, 0.03, 0.3, 0.01, 0.05, 0.02, 0.09, 0.4, 0.1]
    >>> is_spike(0.5, noisy), is_spike(0.5, noisy, deviations=0), is_spike(1.0, noisy)
    (False, True, True)
    """
    if not math.isfinite(loss):
        return True
    if len(recent) < window:
        return False
    losses = list(recent)
    mean = math.fsum(losses[-window:]) / window
    if loss <= losses[-1] or loss - mean < max(threshold * abs(mean), margin):
        return False
    spread = losses[-SPREAD_WINDOW:]
    centre = math.fsum(spread) / len(spread)
    variance = math.fsum((one - centre) ** 2 for one in spread) / max(1, len(spread) - 1)
    return loss - centre >= deviations * math.sqrt(variance)
