"""Finds by which name something that lives in Python can be reached.

What it does: walks from named objects along attributes, entries, closures and bound methods, nearest first, until it
meets one of the objects looked for. When it helps: "a list grows" helps nobody, ``LitModel.history`` does. What it
costs: a walk over much of what lives in Python, once per leak.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

__all__ = ["find_object", "find_path", "find_tensors", "newest_of"]

_MOST = 600_000  # objects looked at
_ENTRIES = 2_000  # of one container
_PLAIN = (str, bytes, int, float, bool, type(None), complex, range)


def find_path(roots: Mapping[str, Any], wanted: Iterable[int]) -> str | None:
    """The name of the first object met whose ``id`` is wanted, or ``None``.

    Args:
        roots: Names and what they stand for, the most important first: all that one reaches is looked at before the
            next, but for the other roots.
        wanted: Ids of objects that live.

    >>> layer, kept = types.SimpleNamespace(cache={"losses": []}), []
    >>> layer.cache["losses"].append(kept)
    >>> find_path({"model": layer}, {id(kept)}), find_path({"model": layer}, {id(object)})
    ("model.cache['losses'][0]", None)
    """
    found = find_object(roots, wanted)
    return None if found is None else found[0]


def find_object(roots: Mapping[str, Any], wanted: Iterable[int]) -> tuple[str, Any] | None:
    """The same, and the object itself."""
    targets, seen = set(wanted), {id(root) for root in roots.values()}
    for name, root in roots.items():
        found = _search(name, root, targets, seen)
        if found is not None:
            return found
    return None


def newest_of(kind: type) -> list[Any]:
    """Up to eight of the objects of a type that the garbage collector was told of last."""
    return [thing for thing in gc.get_objects() if type(thing) is kind][-8:]


def find_tensors(kind: str, kind_of: Callable[[Tensor], str | None]) -> list[Tensor]:
    """Up to eight of the tensors made last of which ``kind_of`` says that they are of that kind."""
    objects = gc.get_objects()
    tensors = (thing for thing in reversed(objects) if issubclass(type(thing), Tensor) and not is_lazy(thing))
    return list(itertools.islice((tensor for tensor in tensors if kind_of(tensor) == kind), 8))


_Place = tuple[Any, str, Any]  # the place it was reached from, how, and the name or number


def _search(name: str, root: Any, wanted: set[int], seen: set[int]) -> tuple[str, Any] | None:
    # A path is put together only at the end: each place knows the one before it.
    line: deque[tuple[Any, _Place]] = deque([(root, (None, "{}", _Name(name)))])
    while line:
        thing, place = line.popleft()
        if id(thing) in wanted:
            return _text(place), thing
        with contextlib.suppress(RuntimeError, AttributeError, ReferenceError):  # another thread may change it
            for how, key, part in _parts(thing):
                if type(part) not in _PLAIN and id(part) not in seen and len(seen) < _MOST:
                    seen.add(id(part))
                    line.append((part, (place, how, key)))
    return None


class _Name(str):
    """Shown as it is, not as text in quotes."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return str(self)


def _text(place: Any) -> str:
    steps: list[str] = []
    while place is not None:
        place, how, key = place
        # What is neither text nor a number may take long to show, or wait for a device.
        step = how.format(f"{key!r:.60}" if isinstance(key, (str, int)) else type(key).__name__)
        if steps[-1:] != [step]:  # a chain of equal links is named once
            steps.append(step)
    return "".join(reversed(steps))


def _parts(thing: Any) -> Iterator[tuple[str, Any, Any]]:
    kind = type(thing)
    if issubclass(kind, dict):
        yield from (("[{}]", key, value) for key, value in _first(dict.items(thing)))
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        yield from (("[{}]", number, value) for number, value in enumerate(_first(thing)))
    elif issubclass(kind, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not bound yet
                yield ", which holds {}", _Name(name), cell.cell_contents
        yield from ((", default {}", number, value) for number, value in enumerate(thing.__defaults__ or ()))
    elif issubclass(kind, types.MethodType):
        yield "", "", thing.__func__
        yield ".__self__", "", thing.__self__
    elif issubclass(kind, functools.partial):
        yield ".func", "", thing.func
        yield ".args", "", thing.args
        yield ".keywords", "", thing.keywords
    if not issubclass(kind, Tensor):
        yield from _attributes(thing, kind)


def _attributes(thing: Any, kind: type) -> Iterator[tuple[str, Any, Any]]:
    with contextlib.suppress(AttributeError):
        named = object.__getattribute__(thing, "__dict__")  # a proxy may do things when asked itself
        for group in ("_modules", "_parameters", "_buffers"):
            if isinstance(named.get(group), dict):
                yield from ((".{}", _Name(key), part) for key, part in _first(named[group].items()))
        yield from ((".{}", _Name(key), value) for key, value in _first(named.items()))
    for parent in kind.__mro__:
        for name, member in vars(parent).items() if parent.__module__ != "builtins" else ():
            if type(member) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # not set
                    yield ".{}", _Name(name), member.__get__(thing)


def _first(entries: Iterable[Any]) -> Iterator[Any]:
    return itertools.islice(list(entries), _ENTRIES)  # a copy, as another thread may add to it
