"""What is allowed, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_speedkit.data.argument_checks import check_choice, check_seconds, checked_integer


@pytest.mark.parametrize("value", [True, False, None, "full"])
def test_what_is_allowed_passes(value: Any) -> None:
    check_choice("shuffle", value, (True, False, None, "full"))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("ful", ValueError, r"^shuffle must be one of True, 'full', got 'ful'\. Did you mean 'full'\?$"),
        ("nothing alike", ValueError, r"got 'nothing alike'\.$"),
        (False, ValueError, r"got False\.$"),
        (1, TypeError, r"^shuffle must be one of True, 'full', got 1\.$"),
        (None, TypeError, r"got None\.$"),
        ([], TypeError, r"got \[\]\.$"),
    ],
)
def test_what_is_not_allowed(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_choice("shuffle", value, (True, "full"))


@pytest.mark.parametrize("value", [3, np.int16(3), np.uint64(3)])
def test_integers_of_any_kind_become_int(value: Any) -> None:
    number = checked_integer("seed", value, 3)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (2, ValueError, r"^seed must be at least 3, got 2\.$"),
        (16, ValueError, r"^seed must be below 2\*\*4, got 16\.$"),
        (True, TypeError, r"^seed must be an int, got True\.$"),
        (3.0, TypeError, r"got 3\.0\.$"),
        ("3", TypeError, r"got '3'\.$"),
        (None, TypeError, r"got None\.$"),
    ],
)
def test_what_is_no_such_integer(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        checked_integer("seed", value, 3, bits=4)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), (float("inf"), ValueError),
     (True, TypeError), ("5", TypeError), (None, TypeError)],
)  # fmt: skip
def test_what_is_no_time(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^seconds must be"):
        check_seconds("seconds", value)


def test_times_pass() -> None:
    for value in (1, 0.5, 1e-9):
        check_seconds("seconds", value)
