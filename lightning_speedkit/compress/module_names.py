"""The names of modules that a user gives: as a list, without what torch.compile adds, and what they match."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["check_names", "matches", "plain_name"]


def check_names(argument: str, names: object) -> list[str]:
    """The names as a list of their own; TypeError if they are no list of names.

    >>> check_names("skip", ["head"]), check_names("skip", None)
    (['head'], [])
    """
    if names is None:
        return []
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, got the string {names!r}; write [{names!r}].")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names, got {names!r}.")
    return list(names)


def plain_name(name: str) -> str:
    """The name of a module or a parameter without what ``torch.compile`` puts into it.

    >>> plain_name("net._orig_mod.fc.weight"), plain_name("net._orig_mod")
    ('net.fc.weight', 'net')
    """
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name``, or a module that it lies in, is one of ``patterns``; ``*`` and ``?`` are wildcards.

    >>> matches("net.head", ["net"]), matches("blocks.1.mlp.fc", ["blocks.?.mlp"]), matches("net.head", ["*.body"])
    (True, True, False)
    """
    parts = plain_name(name).split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(path == pattern or fnmatchcase(path, pattern) for pattern in patterns for path in paths)
