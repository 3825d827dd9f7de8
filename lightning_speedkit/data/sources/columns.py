"""The choice of columns, arrays or features: ``name`` or ``name:type``, in the order that a sample shall have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from lightning_speedkit.errors import SourceError

__all__ = ["Columns", "chosen", "parse_columns"]

Columns = dict[str, str]
"""Name of each column, and its type or ``""``."""

_TYPES = ("int", "float", "bool", "str", "bytes", "array")


def parse_columns(columns: str | Sequence[str] | None) -> Columns | None:
    """The names and types of a choice such as ``"age,zip:str"`` or ``["age", "zip:str"]``; ``None`` for all columns.

    Raises:
        ValueError: an empty or repeated name.

    >>> parse_columns("age,zip:str")
    {'age': '', 'zip': 'str'}
    """
    if columns is None:
        return None
    entries = columns.split(",") if isinstance(columns, str) else list(columns)
    parsed: Columns = {}
    for entry in entries:
        name, colon, kind = entry.rpartition(":")
        if not colon or kind not in _TYPES:  # a colon may be part of a name
            name, kind = entry, ""
        name = name.strip()
        if not name or name in parsed:
            raise ValueError(f"columns must be different names, each with an optional :type, got {columns!r}.")
        parsed[name] = kind
    if not parsed:
        raise ValueError("columns must name at least one column, or be None for all of them.")
    return parsed


def chosen(columns: Columns | None, there: Iterable[str], where: str, *, types: Sequence[str] = ()) -> Columns:
    """The chosen columns after a check that they are there; all of them, untyped, if none were chosen.

    Raises:
        SourceError: a column that is not there.
        ValueError: a type that this format cannot give.
    """
    names = list(there)
    if columns is None:
        return dict.fromkeys(names, "")
    for name, kind in columns.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SourceError(f"{where} has no {name!r}.{hint} It has {', '.join(map(repr, names)) or 'nothing'}.")
        if kind and kind not in types:
            allowed = ", ".join(types) or "no type at all"
            raise ValueError(f"columns has {name}:{kind}, but for {where} a type must be one of: {allowed}.")
    return dict(columns)
