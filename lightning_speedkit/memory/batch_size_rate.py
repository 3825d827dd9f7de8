"""The learning rate that goes with another batch size: by the linear rule, or by the square root."""

from __future__ import annotations

__all__ = ["RULES", "rate_factor"]

RULES = ("linear", "sqrt")


def rate_factor(rule: str | None, before: int, after: int) -> float:
    """By how much to multiply rates: linear (Goyal et al., arXiv 1706.02677), or by the root (Krizhevsky, 1404.5997).

    >>> rate_factor("linear", 8, 32), rate_factor("sqrt", 8, 32), rate_factor(None, 8, 32)
    (4.0, 2.0, 1.0)
    """
    ratio = after / before
    return {"linear": ratio, "sqrt": ratio**0.5}[rule] if rule is not None else 1.0
