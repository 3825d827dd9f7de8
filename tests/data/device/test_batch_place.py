"""Places in a batch: found, replaced, and named when they are not there."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest

from lightning_speedkit.data.device.batch_place import checked_place, place_name, replace_at, value_at


class Pair(NamedTuple):
    image: Any
    label: Any


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        ((1, 2), (0,)),
        ((1, 2), (-2,)),
        ([1, 2], (0,)),
        ({"x": 1, "y": 2}, ("x",)),
        ({0: 1, 1: 2}, (0,)),
        (OrderedDict(x=1, y=2), ("x",)),
        (UserDict(x=1, y=2), ("x",)),
        (Pair(1, 2), ("image",)),
        (Pair(1, 2), (0,)),
        ({"a": (Pair(["b", 1], 2), 3)}, ("a", 0, "image", 1)),
        (1, ()),
    ],
)
def test_a_value_is_found_and_replaced_without_changing_the_batch(batch: Any, keys: tuple[int | str, ...]) -> None:
    before = repr(batch)
    assert value_at(batch, keys, "image") == 1
    new = replace_at(batch, keys, "new")
    assert type(new) is (type(batch) if keys else str)
    assert value_at(new, keys, "image") == "new"
    assert repr(batch) == before


def test_what_is_beside_the_place_is_the_same_object() -> None:
    other, inner = object(), object()
    new = replace_at({"a": [1, inner], "b": other}, ("a", 0), 5)
    assert new["b"] is other
    assert new["a"][1] is inner


@pytest.mark.parametrize(
    ("batch", "keys", "words"),
    [
        ((1, 2), (2,), "image leads to batch[2], but batch is a tuple of 2 elements"),
        ((1, 2), (-3,), "of 2 elements"),
        ((1, 2), ("image",), "batch is a tuple of 2 elements, by number"),
        (Pair(1, 2), ("x",), "with the fields 'image', 'label'"),
        ({"x": 1}, ("image",), "batch has the keys 'x'"),
        ({"x": 1}, (0,), "batch has the keys 'x'"),
        ({"x": (1,)}, ("x", 1), "image leads to batch['x'][1], but batch['x'] is a tuple of 1 elements"),
        (7, (0,), "batch is an int. None stands for the batch itself"),
        ("text", (0,), "batch is a str"),
    ],
)
def test_a_place_that_is_not_there(batch: Any, keys: tuple[int | str, ...], words: str) -> None:
    with pytest.raises(ValueError) as error:
        value_at(batch, keys, "image")
    assert words in str(error.value)


@pytest.mark.parametrize("place", [1.0, True, b"x", [True], [1.0], ["a", None], {"a": 1}, [["a"]]])
def test_what_is_no_place(place: Any) -> None:
    with pytest.raises(TypeError, match="label must be an int, a str, a list"):
        checked_place("label", place)


def test_a_place_is_written_as_python() -> None:
    assert place_name(checked_place("image", ["a", 0])) == "batch['a'][0]"
    assert place_name(()) == "batch"
