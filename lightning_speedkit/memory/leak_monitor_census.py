"""Counts what lives in Python, and names what is more of it at each count.

What it does: a census counts all objects that the garbage collector knows by type, tensors by shape, the lengths of
long containers, the functions behind a tensor that needs a gradient, the entries of function caches, open files, and
the garbage that waits. When it helps: memory is known to grow, and the question is what. What it costs: a collection
of garbage and a walk over all objects of the process, so it is taken only when growth is seen.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Census", "Grown", "grown_between", "kind_of_tensor", "take_census"]

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_LONG = 16  # entries
_CHUNK = 10_000  # objects whose referents are in memory at once
_MOST_NODES = 50_000
_TENSOR_BYTES = 512  # of a tensor besides its numbers, in Python and below it
_HEADER = 16  # bytes that the garbage collector puts before an object
_PER_STEP = 0.5  # fewer new objects than one in two steps are not what leaks in a step
_cache_type: type = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True)
class Census:
    """Numbers only: a census holds on to nothing that it has counted.

    ``types`` is the number of objects of each type; ``tensors`` of each kind of tensor; ``lengths`` of containers, by
    their ``id``; ``nodes`` of functions behind a tensor, the most of its kind; ``caches`` the filling and the limit of
    function caches, by their name; ``garbage`` how many objects nothing referred to any more.
    """

    types: Counter[type] = field(default_factory=Counter)
    tensors: Counter[str] = field(default_factory=Counter)
    lengths: dict[int, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    caches: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    garbage: int = 0


@dataclass(frozen=True)
class Grown:
    """Something of which each census found more. ``kind`` is graph, container, tensors, cache, garbage or objects;
    ``key`` finds it in a census; ``per_step`` is how many more per step, ``bytes_per_step`` an estimate of theirs."""

    kind: str
    key: Any
    name: str
    per_step: float
    bytes_per_step: float


def take_census() -> Census:
    """Collect garbage, and count what is left.

    >>> before, kept = take_census(), [torch.zeros(3, 50021) for _ in range(4)]
    >>> (take_census().tensors - before.tensors)["torch.float32 [3, 50021] on cpu"]
    4
    """
    garbage = gc.collect()
    objects = gc.get_objects()
    types: Counter[type] = Counter(map(type, objects))
    tensor_types = {kind for kind in types if issubclass(kind, Tensor)}
    census = Census(types=types, garbage=garbage)
    for thing in objects:
        kind = type(thing)
        if kind in _CONTAINERS:
            if len(thing) >= _LONG and thing is not objects:
                census.lengths[id(thing)] = len(thing)
        elif kind in tensor_types:
            _count_tensor(thing, census)
        elif kind is _cache_type:
            info = thing.cache_info()
            name = f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', '?')}"
            census.caches[name] = info.currsize, info.maxsize
    census.lengths.update(_plain_dicts(objects))
    return census


def _plain_dicts(objects: list[Any]) -> Iterator[tuple[int, int]]:
    """Dicts of nothing but numbers, texts and arrays: the collector does not know them, only what refers to them."""
    for start in range(0, len(objects), _CHUNK):
        for thing in gc.get_referents(*objects[start : start + _CHUNK]):
            if type(thing) is dict and len(thing) >= _LONG and not gc.is_tracked(thing):
                yield id(thing), len(thing)


def kind_of_tensor(tensor: Tensor) -> str | None:
    """Its dtype, shape and device, and what made it if it needs a gradient; ``None`` for one that has no shape.

    >>> kind_of_tensor(torch.ones(2, requires_grad=True) * 3)
    'torch.float32 [2] on cpu from MulBackward0'
    """
    try:
        kind, function = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}", tensor.grad_fn
    except (
        RuntimeError,
        ValueError,
    ):  # a lazy parameter has no shape yet, and one of a functional transform may be dead
        return None
    return kind if function is None else f"{kind} from {type(function).__name__}"


def _count_tensor(tensor: Tensor, census: Census) -> None:
    kind = kind_of_tensor(tensor)
    if kind is None:
        return
    census.tensors[kind] += 1
    if tensor.grad_fn is not None:
        census.nodes[kind] = max(census.nodes.get(kind, 0), _count_nodes(tensor.grad_fn))


def _count_nodes(function: Any) -> int:
    seen, left = {function}, [function]
    while left and len(seen) < _MOST_NODES:
        for following, _ in left.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return len(seen)


def grown_between(censuses: Sequence[Census], steps: Sequence[int]) -> list[Grown]:
    """What grew from each census to the next by at least one in two steps, the likeliest culprit first.

    Args:
        censuses: Two or more.
        steps: At which step each was taken.

    >>> one, two, three = (Census(types=Counter({set: count})) for count in (5, 25, 45))
    >>> [(grown.name, grown.per_step) for grown in grown_between([one, two, three], [0, 20, 40])]
    [('set', 1.0)]
    """
    span = steps[-1] - steps[0]

    def rising(name: str) -> Iterator[tuple[Any, float]]:
        tables: list[Any] = [getattr(census, name) for census in censuses]
        for key, last in tables[-1].items():
            counts = [table.get(key, 0) for table in tables[:-1]] + [last]
            if _rises(counts, steps):
                yield key, (counts[-1] - counts[0]) / span

    found = [
        Grown("graph", key, "the graph behind a tensor", rate, rate * _TENSOR_BYTES) for key, rate in rising("nodes")
    ]
    tensors = [Grown("tensors", key, key, rate, rate * _bytes_of(key)) for key, rate in rising("tensors")]
    containers = [Grown("container", key, "container", rate, rate * 8) for key, rate in rising("lengths")]
    found += sorted(tensors, key=lambda grown: -grown.bytes_per_step) + containers + list(_caches(censuses, steps))
    types = [
        Grown("objects", key, _type_name(key), rate, rate * _size_of(key))
        for key, rate in rising("types")
        if not issubclass(key, Tensor)
    ]
    collected = [census.garbage for census in censuses[1:]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    if all(count >= _PER_STEP * gap for count, gap in zip(collected, gaps, strict=True)):
        rate = sum(collected) / span
        found.append(Grown("garbage", None, "garbage in reference cycles", rate, rate * 64))
    return found + sorted(types, key=_rank)


def _rises(counts: Sequence[int], steps: Sequence[int]) -> bool:
    return all(
        counts[number] - counts[number - 1] >= _PER_STEP * (steps[number] - steps[number - 1])
        for number in range(1, len(counts))
    )


def _caches(censuses: Sequence[Census], steps: Sequence[int]) -> Iterator[Grown]:
    for name, (last, limit) in censuses[-1].caches.items():
        counts = [census.caches.get(name, (0, None))[0] for census in censuses[:-1]] + [last]
        if _rises(counts, steps):
            rate = (counts[-1] - counts[0]) / (steps[-1] - steps[0])
            bound = "without a limit" if limit is None else f"of at most {limit} entries"
            yield Grown("cache" if limit is None else "filling cache", name, f"the cache of {name}, {bound}", rate, 0.0)


def _rank(grown: Grown) -> tuple[bool, bool, float]:
    """Files before others, types of the user before those that hold them, many before few."""
    key = grown.key
    return not issubclass(key, io.IOBase), key.__module__ in ("builtins", "weakref", "collections"), -grown.per_step


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _size_of(kind: type) -> float:
    buffer = io.DEFAULT_BUFFER_SIZE if issubclass(kind, io.IOBase) else 0
    return buffer + _HEADER + getattr(kind, "__basicsize__", 0)


def _bytes_of(key: str) -> float:
    dtype, _, rest = key.partition(" [")
    shape = rest.partition("]")[0]
    size = getattr(getattr(torch, dtype.removeprefix("torch."), None), "itemsize", 4)
    for length in filter(None, shape.split(", ")):
        size *= int(length) if length.isdecimal() else 1  # a symbol while something is traced
    return size + _TENSOR_BYTES
