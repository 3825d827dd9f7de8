"""The table of sets: against counting by hand, and against all antichains of a small forest."""

from __future__ import annotations

import itertools

import numpy

from lightning_speedkit.memory.checkpoint_budget_search import Unit, choice_table


def _rows(units: list[Unit], paths: list[str]) -> set[tuple[str, ...]]:
    table = choice_table(units, {path: place for place, path in enumerate(paths)})
    rows = [tuple(path for path, taken in zip(paths, row, strict=True) if taken) for row in table]
    assert len(set(rows)) == len(rows)
    return set(rows)


def test_unlike_modules_give_every_set_of_which_none_lies_inside_another() -> None:
    inner = [Unit(f"a.{name}", (name,), 2, 1.0) for name in "xy"]
    units = [Unit("a", ("A",), 5, 3.0, tuple(inner)), Unit("b", ("B",), 5, 3.0), Unit("c", ("C",), 1, 1.0)]
    paths = ["a", "a.x", "a.y", "b", "c"]
    every = itertools.chain.from_iterable(itertools.combinations(paths, k) for k in range(6))
    expected = {chosen for chosen in every if not ("a" in chosen and {"a.x", "a.y"} & set(chosen))}
    assert _rows(units, paths) == expected
    assert len(expected) == 5 * 2 * 2


def test_of_equal_modules_the_first_ones_give_up_most() -> None:
    units = [Unit(p, ("Block",), 9, 2.0, (Unit(f"{p}.attention", ("Attention",), 4, 1.0),)) for p in ("0", "1")]
    paths = ["0", "0.attention", "1", "1.attention"]
    assert _rows(units, paths) == {
        *((), ("0",), ("0.attention",)),
        *(("0", "1"), ("0", "1.attention"), ("0.attention", "1.attention")),
    }


def test_a_hundred_equal_modules_are_a_hundred_and_one_sets() -> None:
    units = [Unit(str(i), ("Block",), 9, 2.0) for i in range(100)]
    table = choice_table(units, {str(i): i for i in range(100)})
    assert numpy.array_equal(table, numpy.tri(101, 100, -1, dtype=bool))


def test_of_too_many_sets_inner_modules_and_then_the_least_valuable_are_left_out() -> None:
    units = [Unit(str(i), (i,), 100 * i, 1.0, (Unit(f"{i}.0", (i, "inner"), 50 * i, 0.5),)) for i in range(20)]
    paths = [unit.path for unit in units] + [f"{unit.path}.0" for unit in units]
    table = choice_table(units, {path: place for place, path in enumerate(paths)})
    assert len(table) == 2**17
    used = [path for path, taken in zip(paths, table.any(axis=0), strict=True) if taken]
    assert used == [str(i) for i in range(3, 20)]
