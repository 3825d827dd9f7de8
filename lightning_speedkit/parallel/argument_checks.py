"""Checks of arguments that several strategies take: a wrong one is an error that says what is allowed."""

from __future__ import annotations

import operator
from datetime import timedelta
from numbers import Real

__all__ = ["check_number", "check_switch", "checked_integer", "checked_timeout"]


def check_number(name: str, value: object) -> None:
    """Raise unless it is a number.

    Raises:
        TypeError: it is none.

    >>> check_number("seconds", "60")
    Traceback (most recent call last):
    ...
    TypeError: seconds='60' must be a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number.")


def check_switch(name: str, value: object) -> None:
    """Raise unless it is a bool.

    Raises:
        TypeError: it is none.

    >>> check_switch("static_graph", "yes")
    Traceback (most recent call last):
    ...
    TypeError: static_graph='yes' must be True or False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")


def checked_integer(name: str, value: object, least: int) -> int:
    """The value as an ``int`` of ``least`` or more; ``True`` is none.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is too small.

    >>> checked_integer("powersgd_rank", 0, 1)
    Traceback (most recent call last):
    ...
    ValueError: powersgd_rank=0 must be at least 1.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    number = operator.index(value)  # type: ignore[arg-type]  # it was just seen to have what this asks for
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}.")
    return number


def checked_timeout(timeout_seconds: float) -> timedelta:
    """How long a collective may take, for torch.

    Raises:
        TypeError: it is no number.
        ValueError: it is not from 0.001 to 1e9.

    >>> checked_timeout(90)
    datetime.timedelta(seconds=90)
    """
    check_number("timeout_seconds", timeout_seconds)
    # torch keeps milliseconds, and adds them to a clock of nanoseconds in 64 bits
    if not 0.001 <= timeout_seconds <= 1e9:
        raise ValueError(f"timeout_seconds={timeout_seconds!r} must be from 0.001 to 1e9.")
    return timedelta(seconds=float(timeout_seconds))
