"""What is said of a call that has another form than the one that a network was quantized for."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from lightning_speedkit.compress.call_difference import TENSOR, difference, refusal_of_call, same


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"x": TENSOR, "batch": {"ids": TENSOR, "labels": TENSOR}}, ""),
        ({"x": TENSOR, "batch": {"ids": TENSOR}}, "labels is missing"),
        ({"x": None, "batch": {"ids": TENSOR, "labels": TENSOR}}, "x is missing"),
        ({"x": 3, "batch": {"ids": TENSOR, "labels": TENSOR}}, "x is 3, and was a tensor"),
        ({"x": [TENSOR], "batch": {"ids": TENSOR, "labels": TENSOR}}, "x is missing; x[0] is given, and was not"),
        ({"x": TENSOR, "batch": {"ids": {"a": TENSOR}, "labels": TENSOR}}, "ids is missing; ids['a'] is given, and "),
    ],
)
def test_each_difference_is_named_where_the_caller_gives_it(found: dict[str, Any], told: str) -> None:
    wanted = {"x": TENSOR, "batch": {"ids": TENSOR, "labels": TENSOR}}
    if told:
        assert told in difference(wanted, found, spread=["batch"])
        assert told in refusal_of_call("Net", wanted, found, spread=["batch"])
    else:
        assert same(wanted, found)


def test_the_parts_of_a_named_dict_are_named_inside_it() -> None:
    assert difference({"batch": {"labels": TENSOR}}, {"batch": {}}) == "batch['labels'] is missing"


def test_no_argument_is_cut_off() -> None:
    many = {f"argument_{index}": TENSOR for index in range(40)}
    told = refusal_of_call("Net", {"batch": many}, {"batch": {}}, spread=["batch"])
    assert all(f"{name} is missing" in told for name in many)
    assert "zeros of the same shape stand in for labels" in told
    assert "quantize with backend='torch-ao-dynamic'" in told


def test_zeros_are_advised_only_where_something_is_missing() -> None:
    told = refusal_of_call("Net", {"x": TENSOR, "scale": 1.0}, {"x": TENSOR, "scale": 2.0})
    assert "scale is 2.0, and was 1.0. Give what it was given there. Or quantize" in told


def test_an_array_is_not_the_same_as_a_mark() -> None:
    assert not same(numpy.ones((2, 2)), numpy.ones((2, 2)))
    assert difference({"x": TENSOR}, {"x": numpy.zeros(2)}) == "x is array([0., 0.]), and was a tensor"
    assert "\n" not in difference({"x": TENSOR}, {"x": numpy.zeros((9, 9))})
