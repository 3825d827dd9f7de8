"""The shapes of learning-rate schedules, as pure functions of progress.

Progress is 0 before the first step of a run and 1 after its last one, and a shape gives what the peak learning rate is
multiplied with there. Pure functions can be drawn, tested at any point, and resumed at any point. They cost nothing.
"""

from __future__ import annotations

import math

__all__ = [
    "constant_at",
    "inverse_sqrt_at",
    "linear_at",
    "one_cycle_at",
    "warmup_cosine_at",
    "warmup_stable_decay_at",
]


def _falling(progress: float, start: float) -> float:
    """How far the fall from ``start`` to the end of the run has come, 0 to 1."""
    return min(1.0, max(0.0, (progress - start) / (1 - start))) if start < 1 else 0.0


def _cosine(share: float) -> float:
    """From 1 to 0 along half a cosine."""
    return (1 + math.cos(math.pi * share)) / 2


def constant_at(progress: float, warmup: float = 0.0) -> float:
    """A straight rise over ``warmup`` of the run, then 1.

    >>> constant_at(0.05, warmup=0.1), constant_at(0.5, warmup=0.1)
    (0.5, 1.0)
    """
    return progress / warmup if progress < warmup else 1.0


def linear_at(progress: float, warmup: float = 0.0, final: float = 0.0) -> float:
    """A straight rise, then a straight fall to ``final`` (BERT, arXiv 1810.04805).

    >>> linear_at(0.75, warmup=0.5)
    0.5
    """
    return constant_at(progress, warmup) if progress < warmup else 1 - (1 - final) * _falling(progress, warmup)


def warmup_cosine_at(progress: float, warmup: float = 0.0, final: float = 0.0) -> float:
    """A straight rise, then half a cosine to ``final`` (SGDR without restarts, arXiv 1608.03983).

    >>> round(warmup_cosine_at(0.75, warmup=0.5), 6)
    0.5
    """
    if progress < warmup:
        return constant_at(progress, warmup)
    return final + (1 - final) * _cosine(_falling(progress, warmup))


def one_cycle_at(progress: float, warmup: float = 0.3, final: float = 4e-6, initial: float = 0.04) -> float:
    """A cosine from ``initial`` up to 1, and a cosine down to ``final`` (Smith and Topin, arXiv 1708.07120).

    The defaults are those of ``torch.optim.lr_scheduler.OneCycleLR``. The momentum is left as it is.

    >>> [round(one_cycle_at(p), 6) for p in (0.0, 0.15, 0.3, 1.0)]
    [0.04, 0.52, 1.0, 4e-06]
    """
    if progress < warmup:
        return 1 + (initial - 1) * _cosine(progress / warmup)
    return final + (1 - final) * _cosine(_falling(progress, warmup))


def warmup_stable_decay_at(
    progress: float, warmup: float = 0.0, final: float = 0.0, decay: float = 0.2, power: float = 0.5
) -> float:
    """A straight rise, 1, and over the last ``decay`` of the run a fall to ``final`` by 1 - share ** power.

    The stable part can be prolonged, and the fall begun at any time (MiniCPM, arXiv 2404.06395). A power of 0.5 fell
    to lower losses than a straight line, a power of 1 (Haegele et al., arXiv 2405.18392).

    >>> [round(warmup_stable_decay_at(p, warmup=0.1), 6) for p in (0.05, 0.5, 0.85, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return constant_at(progress, warmup)
    return 1 - (1 - final) * math.pow(_falling(progress, max(warmup, 1 - decay)), power)


def inverse_sqrt_at(progress: float, warmup: float = 0.05) -> float:
    """A straight rise, then a fall with one over the root of the steps (Vaswani et al., arXiv 1706.03762).

    >>> inverse_sqrt_at(0.4, warmup=0.1)
    0.5
    """
    return constant_at(progress, warmup) if progress < warmup or not progress else math.sqrt(warmup / progress)
