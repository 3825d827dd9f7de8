"""By which name things are reached, against names written by hand."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.memory.leak_monitor_owner import find_object, find_path, find_tensors, newest_of


class Wanted:
    pass


class Slotted:
    __slots__ = ("kept", "unset")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Proxy:
    """Complains when asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def _closure(kept: Any) -> Callable[[], Any]:
    return lambda: kept


def _module(kept: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    module[1].history = [kept]  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda kept: {"a": [0, kept]}, "root['a'][1]"),
        (lambda kept: OrderedDict([(3, kept)]), "root[3]"),
        (lambda kept: deque([kept]), "root[0]"),
        (_module, "root.1.history[0]"),
        (Slotted, "root.kept"),
        (_closure, "root, which holds kept"),
        (lambda kept: functools.partial(print, kept), "root.args[0]"),
        (lambda kept: Slotted([Proxy(), kept]), "root.kept[1]"),
        (lambda kept: [[[[[kept]]]]], "root[0]"),  # equal links are named once
    ],
)
def test_a_thing_is_found_by_the_way_to_it(made: Callable[[Any], Any], name: str) -> None:
    wanted = Wanted()
    assert find_object({"root": made(wanted)}, [id(wanted)]) == (name, wanted)


def test_the_first_root_goes_before_the_others_and_stays_out_of_them() -> None:
    wanted, first = Wanted(), Slotted(None)
    second = Slotted(wanted)
    first.kept = {"second": second}
    assert find_path({"first": first, "second": second}, [id(wanted)]) == "second.kept"
    assert find_path({"first": first}, [id(wanted)]) == "first.kept['second'].kept"
    assert find_path({"first": Slotted(None)}, [id(wanted)]) is None


def test_the_tensors_made_last_are_found_by_their_kind() -> None:
    made = [torch.zeros(7, 4242 + number // 10) for number in range(20)]
    found = find_tensors("4243", lambda tensor: str(tensor.shape[-1]) if tensor.dim() else None)
    assert len(found) == 8
    assert all(any(tensor is one for one in made[10:]) for tensor in found)
    things = [Wanted() for _ in range(3)]
    assert set(newest_of(Wanted)) >= set(things)
