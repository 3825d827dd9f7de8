"""Every set of modules worth trying, as a table: of nested modules one level, of equal ones the first in order.

The modules form a forest; a set takes a module whole, or sets of those inside it. Modules side by side that are equal
(same class, same bytes) differ only in when they run: taking the earlier is never worse, since what is given up early
is not held during any later backward. So of equal modules only how many take which option is tried, the option that
gives up more first. That is exact in the memory model, and turns 2^n sets into n + 1.

What it costs: up to 131,072 sets are listed. Where there would be more, first the modules inside others are left out,
then of those that are not alike the ones that save least per second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy
from numpy.typing import NDArray

__all__ = ["Unit", "choice_table", "walk_units"]

_MOST_CHOICES = 1 << 17


@dataclass(frozen=True, slots=True)
class Unit:
    """A candidate and those inside it. Units of the same ``kind`` side by side are interchangeable."""

    path: str
    kind: tuple[object, ...]
    saved_bytes: int
    seconds: float
    inside: tuple[Unit, ...] = field(default=())


def choice_table(units: Sequence[Unit], places: Mapping[str, int]) -> NDArray[numpy.bool_]:
    """The sets as rows of booleans; ``places`` gives each path its column.

    Args:
        units: The outermost candidates, in the order in which they run.
        places: Of each path the column. A path may lack; what is left out stays False.

    >>> equal = [Unit(path, ("Block",), 8, 1.0) for path in "abc"]
    >>> choice_table(equal, {"a": 0, "b": 1, "c": 2}).astype(int).tolist()
    [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    units = _small_enough(list(units))
    sets = _of_all(units)
    table = numpy.zeros((len(sets), len(places)), dtype=numpy.bool_)
    for row, paths in enumerate(sets):
        table[row, [places[path] for path in paths]] = True
    return table


def walk_units(units: Sequence[Unit]) -> Iterator[Unit]:
    """The units and all inside them."""
    for unit in units:
        yield unit
        yield from walk_units(unit.inside)


def _of_all(units: Sequence[Unit]) -> list[tuple[str, ...]]:
    """The sets within units side by side."""
    per_kind = []
    for members in _by_kind(units).values():
        saved = {unit.path: unit.saved_bytes for unit in walk_units([members[0]])}
        options = sorted(_of_one(members[0]), key=lambda paths: -sum(saved[path] for path in paths))
        taken = []
        for which in itertools.combinations_with_replacement(range(len(options)), len(members)):
            paths: tuple[str, ...] = ()
            for member, option in zip(members, which, strict=True):
                paths += tuple(member.path + path[len(members[0].path) :] for path in options[option])
            taken.append(paths)
        per_kind.append(taken[::-1])  # the fewest first
    return [sum(parts, ()) for parts in itertools.product(*per_kind)]


def _of_one(unit: Unit) -> list[tuple[str, ...]]:
    return [*_of_all(unit.inside), (unit.path,)]


def _count(units: Sequence[Unit]) -> int:
    """How many sets :func:`_of_all` would list."""
    return math.prod(
        math.comb(len(members) + _count(members[0].inside), len(members)) for members in _by_kind(units).values()
    )


def _small_enough(units: list[Unit]) -> list[Unit]:
    depth = max((_depth(unit) for unit in units), default=0)
    while _count(units) > _MOST_CHOICES and depth > 1:
        depth -= 1
        units = [_cut(unit, depth) for unit in units]
    while _count(units) > _MOST_CHOICES:
        kinds = _by_kind(units)
        least = min(kinds, key=lambda kind: kinds[kind][0].saved_bytes / max(kinds[kind][0].seconds, 1e-9))
        units = [unit for unit in units if unit.kind != least]
    return units


def _depth(unit: Unit) -> int:
    return 1 + max((_depth(inner) for inner in unit.inside), default=0)


def _cut(unit: Unit, depth: int) -> Unit:
    inside = tuple(_cut(inner, depth - 1) for inner in unit.inside) if depth > 1 else ()
    return replace(unit, inside=inside)


def _by_kind(units: Sequence[Unit]) -> dict[tuple[object, ...], list[Unit]]:
    kinds: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        kinds.setdefault(unit.kind, []).append(unit)
    return kinds
