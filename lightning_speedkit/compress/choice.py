"""An argument that is one of a few words, and the word that was meant where another was given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning_speedkit.errors import did_you_mean

__all__ = ["check_choice"]

_OTHER_WORDS = {
    "latency": ("fast", "fastest", "performance", "runtime", "seconds", "speed", "throughput", "time"),
    "size": ("bytes", "disk", "memory", "small", "smallest", "storage"),
    "cuda": ("gpu", "nvidia"),
    "max": ("higher", "highest", "maximize"),
    "min": ("lower", "lowest", "minimize"),
    "train": ("fit", "training"),
    "val": ("valid", "validate", "validation"),
    "last": ("current", "end", "final", "latest"),
    "layer": ("layerwise", "local"),
    "magnitude": ("l1", "l2", "norm", "weight", "weights"),
    "movement": ("gradient", "gradients"),
    "taylor": ("gradient", "gradients"),
}


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """A ValueError that names the allowed value that was meant, as far as one can tell, if ``value`` is none of them.

    >>> check_choice("objective", "speed", ("latency", "size"))
    Traceback (most recent call last):
    ValueError: objective must be one of 'latency', 'size', got 'speed'. Did you mean 'latency'?
    """
    if value not in allowed:
        near = _meant(str(value), allowed)
        hint = f" Did you mean {near!r}?" if near else did_you_mean(value, allowed, most=1)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def _meant(value: str, allowed: Sequence[str]) -> str | None:
    """The allowed value that has the same words in another order, or means the same."""
    same = [word for word in allowed if _words(word) == _words(value)]
    same += [word for word in allowed if value.lower() in _OTHER_WORDS.get(word, ())]
    return next(iter(same), None)


def _words(text: str) -> list[str]:
    return sorted(re.split(r"[-_ ]", text.lower()))
