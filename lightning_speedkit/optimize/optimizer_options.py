"""Names and options that a user may write in YAML, checked against what there is, with the nearest name on a miss.

It helps where a typing error would otherwise train with a default. It costs nothing during training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

__all__ = ["checked_number", "checked_options", "unknown_name"]


def unknown_name(what: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not there; it suggests the nearest and lists all.

    >>> str(unknown_name("optimizer", "adam_w", ["adam", "adamw", "muon"]))
    "There is no optimizer 'adam_w'. Did you mean 'adamw'? Known: adam, adamw, muon."
    """
    names = list(known)
    near = difflib.get_close_matches(str(name).lower().replace("_", "-"), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"There is no {what} {name!r}.{hint} Known: {', '.join(names)}.")


def checked_options(what: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> dict[str, Any]:
    """A copy of the options, with lists as tuples (YAML has no tuples).

    Raises:
        TypeError: ``options`` is no mapping.
        ValueError: A key is not one of ``allowed``.

    >>> checked_options("adamw", {"betas": [0.9, 0.95]}, ["betas", "eps"])
    {'betas': (0.9, 0.95)}
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must be a mapping from the name of an option of {what} to its value.")
    known = list(allowed)
    for key in options:
        if key not in known:
            raise unknown_name(f"option of {what}", key, known)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def checked_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """The value as a ``float`` if it is a number of at least ``low`` (``above`` it) and at most ``high``.

    >>> checked_number("lr", 1, 0)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number; got {type(value).__name__}.")
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name}={value!r} must be {least}{most}.")
    return number
