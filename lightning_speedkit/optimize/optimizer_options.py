"""Names and options that a user may write in YAML, checked against what there is, with the nearest name on a miss.

It helps where a typing error would otherwise train with a default. It costs nothing during training.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from lightning_speedkit.errors import did_you_mean

__all__ = [
    "checked_flag",
    "checked_name",
    "checked_number",
    "checked_options",
    "defaults_of",
    "unknown_name",
]


def unknown_name(what: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not there; it suggests the nearest and lists all.

    >>> str(unknown_name("optimizer", "adam_w", ["adam", "adamw", "muon"]))
    "There is no optimizer 'adam_w'. Did you mean 'adamw'? Known: adam, adamw, muon."
    """
    names = list(known)
    return ValueError(f"There is no {what} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names) or 'none'}.")


def checked_name(what: str, name: object, known: Iterable[str]) -> str:
    """The name, if it is known.

    Raises:
        TypeError: It is no text.
        ValueError: There is no such name.

    >>> checked_name("optimizer", "adam", ["adam", "adamw"])
    'adam'
    """
    names = list(known)
    if not isinstance(name, str):
        raise TypeError(f"The name of the {what} is text, one of {', '.join(names)}; got {type(name).__name__}.")
    if name not in names:
        raise unknown_name(what, name, names)
    return name


def defaults_of(function: Callable[..., Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """The named arguments of a function or class, or those among ``names``, and their defaults."""
    parameters = inspect.signature(function).parameters
    chosen = parameters if names is None else [name for name in names if name in parameters]
    return {name: parameters[name].default for name in chosen}


def checked_options(what: str, options: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the options, with lists as tuples (YAML has no tuples).

    Args:
        what: What the options are for.
        options: From a name to its value.
        defaults: The names that are allowed, with a value each that shows the kind: a default of ``False`` wants a
            truth value, a number wants a number, a tuple one number for each of its own, a text wants text.

    Raises:
        TypeError: ``options`` is no mapping, or a value is of another kind than the default.
        ValueError: A key is not one of ``defaults``, or a tuple has another length.

    >>> checked_options("adamw", {"betas": [0.9, 0.95]}, {"betas": (0.9, 0.999), "eps": 1e-8})
    {'betas': (0.9, 0.95)}
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must be a mapping from the name of an option of {what} to its value.")
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise unknown_name(f"option of {what}", key, defaults)
        value = tuple(value) if isinstance(value, list) else value
        _check_kind(key, value, defaults[key])
        checked[key] = value
    return checked


def _check_kind(name: str, value: Any, default: Any) -> None:
    if isinstance(value, Tensor) or value == default:
        return
    if isinstance(default, bool) or (default is None and isinstance(value, str)):
        checked_flag(name, value)
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r} must be text, such as {default!r}; got {type(value).__name__}.")
    elif isinstance(default, tuple):
        if not isinstance(value, tuple):
            raise TypeError(f"{name}={value!r} must be {len(default)} numbers, such as {list(default)}.")
        if len(value) != len(default):
            raise ValueError(f"{name}={list(value)} must be {len(default)} numbers, such as {list(default)}.")
        for position, part in enumerate(value):
            if part is not None or None not in default:
                _check_number(f"{name}[{position}]", part)
    elif isinstance(default, Real) and isinstance(value, tuple):  # one for each parameter group
        for position, part in enumerate(value):
            _check_number(f"{name}[{position}]", part)
    elif isinstance(default, Real):
        _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        raise _no_number(name, value)


def _no_number(name: str, value: object) -> TypeError:
    """The error; where text reads as a number it says how to write one: ``1e-3`` is text in YAML 1.1."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    hint = ""
    if str(value).strip().isdecimal():
        hint = f" Write it without quotes: {str(value).strip()}."
    elif math.isfinite(number):
        digits, e, power = repr(number).partition("e")
        point = "" if "." in digits else ".0"
        hint = f" Write it without quotes, and in YAML with a point: {digits}{point}{e}{power}."
    return TypeError(f"{name}={value!r} must be a number; got {type(value).__name__}.{hint}")


def checked_flag(name: str, value: Any) -> bool:
    """The value, if it is a truth value; ``"no"`` is none, and would count as true.

    >>> checked_flag("nesterov", False)
    False
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be true or false; got {type(value).__name__}.")
    return value


def checked_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """The value as a ``float`` if it is a number of at least ``low`` (``above`` it) and at most ``high``.

    Raises:
        TypeError: It is no number; text that reads as one is not taken for it.
        ValueError: It is out of range.

    >>> checked_number("lr", 1, 0)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _no_number(name, value)
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == math.inf else f" and at most {high:g}"
        finite = "" if math.isfinite(number) else ", and finite"
        raise ValueError(f"{name}={value!r} must be {least}{most}{finite}.")
    return number
