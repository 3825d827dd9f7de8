"""Says where an argument belongs that was given in the wrong place, such as ``betas`` beside ``options``.

It helps where Python's own message only says that an argument is unexpected. It costs nothing during training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from lightning_speedkit.errors import did_you_mean

__all__ = ["names_options"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def names_options(
    where: str, options: Callable[[], Iterable[str]]
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator: an unknown keyword is an error that says where options go, or what the nearest argument is.

    Args:
        where: How an option is given, with ``NAME`` in the place of its name.
        options: The names of all options, asked for when there is an unknown keyword.

    >>> @names_options("f(options={'NAME': ...})", lambda: ["betas"])
    ... def f(lr=0.1, options=None): ...
    >>> f(betas=0.9)
    Traceback (most recent call last):
        ...
    TypeError: betas is no argument here but an option. Write f(options={'betas': ...}).
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        known = inspect.signature(function).parameters
        call: Callable[..., _Result] = function

        def checked(keywords: dict[str, Any]) -> dict[str, Any]:
            for name in keywords:
                if name in known:
                    continue
                if name in options():
                    raise TypeError(f"{name} is no argument here but an option. Write {where.replace('NAME', name)}.")
                names = [other for other in known if other != "self"]
                raise TypeError(
                    f"There is no argument {name!r}.{did_you_mean(name, names)} The arguments are {', '.join(names)}."
                )
            return keywords

        return functools.wraps(function)(lambda *arguments, **keywords: call(*arguments, **checked(keywords)))

    return decorate
