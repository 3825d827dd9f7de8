"""Checks of arguments that several loaders and DataModules take: a wrong one is an error that says what is allowed."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from typing import Any

__all__ = ["a_type", "check_choice", "check_seconds", "checked_integer"]


def a_type(value: Any) -> str:
    """The name of its type with the article that an error says it with.

    >>> a_type(3), a_type("x"), a_type(b"x")
    ('an int', 'a str', 'a bytes')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name.startswith('nd') else 'a'} {name}"


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise unless ``value`` is one of the allowed ones; ``1`` is not ``True``.

    Raises:
        TypeError: none of the allowed values has that type.
        ValueError: the type is right; the error names the nearest allowed value.

    >>> check_choice("loader", "thread", ("auto", "threads"))
    Traceback (most recent call last):
    ...
    ValueError: loader must be one of 'auto', 'threads', got 'thread'. Did you mean 'threads'?
    """
    if any(type(value) is type(choice) and value == choice for choice in allowed):
        return
    texts = [choice for choice in allowed if isinstance(choice, str)]
    near = difflib.get_close_matches(value, texts, 1) if isinstance(value, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    words = f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}"
    raise (ValueError if any(type(value) is type(choice) for choice in allowed) else TypeError)(words)


def checked_integer(name: str, value: Any, least: int, *, bits: int = 62) -> int:
    """The value as an ``int`` from ``least`` to ``2**bits - 1``; NumPy's integers are taken too, ``True`` is not.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.

    >>> checked_integer("batch_size", 0, 1)
    Traceback (most recent call last):
    ...
    ValueError: batch_size must be at least 1, got 0.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
    if number >= 1 << bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {number}.")
    return number


def check_seconds(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number of seconds above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or not finite.

    >>> check_seconds("seconds", 0)
    Traceback (most recent call last):
    ...
    ValueError: seconds must be above 0 and finite, got 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {value}.")
