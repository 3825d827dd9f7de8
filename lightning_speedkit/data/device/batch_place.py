"""The places of a batch: where its images are and where its labels are, in tuples and dicts within each other.

A place is a key of a dict, the number of an element of a tuple or list, the name of a field of a named tuple, or a list
of these that leads from the outside in. ``None`` is the batch itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lightning_speedkit.data.argument_checks import a_type

__all__ = ["Place", "checked_place", "place_name", "replace_at", "value_at"]

Place: TypeAlias = int | str | Sequence[int | str] | None


def checked_place(name: str, place: Place) -> tuple[int | str, ...]:
    """A place as the keys that lead to it; a ``TypeError`` for what is none.

    >>> checked_place("image", 0), checked_place("image", ["views", 1]), checked_place("image", None)
    ((0,), ('views', 1), ())
    """
    if place is None:
        return ()
    keys = [place] if isinstance(place, int | str) else place
    if not isinstance(keys, list | tuple) or any(isinstance(k, bool) or not isinstance(k, int | str) for k in keys):
        raise TypeError(f"{name} must be an int, a str, a list of these, or None for the batch itself; got {place!r}.")
    return tuple(keys)


def place_name(keys: Sequence[int | str]) -> str:
    """How a place is written: ``batch['views'][1]``."""
    return "batch" + "".join(f"[{key!r}]" for key in keys)


def value_at(batch: Any, keys: Sequence[int | str], name: str) -> Any:
    """What is at a place of a batch.

    Args:
        batch: Tuples, lists, named tuples and mappings, within each other.
        keys: What leads to the place, from the outside in.
        name: Of the argument that says so, for the message.

    Raises:
        ValueError: There is nothing; the message says what the batch has there.

    >>> value_at({"views": (1, 2)}, ("views", 1), "image")
    2
    """
    value = batch
    for depth, key in enumerate(keys):
        value = _element(value, key, f"{name} leads to {place_name(keys)}, but {place_name(keys[:depth])}")
    return value


def replace_at(batch: Any, keys: Sequence[int | str], value: Any) -> Any:
    """The same batch with another value at a place that it has; the one that was given is not changed.

    >>> batch = {"views": (1, 2), "name": "a"}
    >>> replace_at(batch, ("views", 1), 3), batch
    ({'views': (1, 3), 'name': 'a'}, {'views': (1, 2), 'name': 'a'})
    """
    if not keys:
        return value
    key, *inner = keys
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)
        new[key] = replace_at(batch[key], inner, value)
        return new
    elements = list(batch)
    number = batch._fields.index(key) if isinstance(key, str) else key
    elements[number] = replace_at(elements[number], inner, value)
    if isinstance(batch, list):
        return elements
    return type(batch)(*elements) if hasattr(batch, "_fields") else tuple(elements)


def _element(batch: Any, key: int | str, lead: str) -> Any:
    if isinstance(batch, Mapping):
        if key in batch:
            return batch[key]
        raise ValueError(f"{lead} has the keys {', '.join(map(repr, batch))}.")
    if not isinstance(batch, list | tuple):
        raise ValueError(f"{lead} is {a_type(batch)}. None stands for the batch itself.")
    fields = getattr(batch, "_fields", ())
    if isinstance(key, str):
        if key in fields:
            return batch[fields.index(key)]
    elif -len(batch) <= key < len(batch):
        return batch[key]
    has = f"with the fields {', '.join(map(repr, fields))}" if fields else f"of {len(batch)} elements, by number"
    raise ValueError(f"{lead} is {a_type(batch)} {has}.")
