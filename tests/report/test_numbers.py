"""Numbers as text, by hand and against decimal arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_speedkit.report.numbers import format_number, ratio_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (7, "7"),
        (7.0, "7.00"),
        (12.345, "12.3"),
        (999.4, "999"),
        (1000.0, "1\u202f000"),
        (1234567, "1\u202f234\u202f567"),
        (0.00012345, "0.000123"),
        (-2.5, "-2.50"),
        (math.nan, "n/a"),
        (math.inf, "n/a"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text
    assert format_number(value, "ms") == f"{text} ms"


def test_a_gain_and_the_loss_it_mirrors_have_the_same_factor() -> None:
    for ratio in (1.01, 1.5, 2.0, 9.99, 25.0):
        assert ratio_text(ratio, "up", "down")[0] == ratio_text(1 / ratio, "up", "down")[0]


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-12, 1e12), st.sampled_from([1, -1]))
def test_three_digits_or_the_whole_number_and_never_more(size: float, sign: int) -> None:
    """The oracle rounds in decimal to the unit that three digits, or a whole number, leave."""
    value = sign * size
    text = format_number(value)
    exact = Decimal(value)
    rounded = Decimal(f"{exact:.3g}")  # three digits, also where the rounding carries into a fourth
    told = Decimal(text.replace("\u202f", ""))
    if abs(rounded) >= 1000:
        assert told == exact.to_integral_value()
        assert "." not in text
        assert all(len(group) == 3 for group in text.split("\u202f")[1:])
    else:
        assert told == rounded
        assert len(told.as_tuple().digits) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.999, "10.0"), (99.96, "100"), (999.96, "1\u202f000"), (0.09999, "0.100"), (0.9996, "1.00"), (-9.999, "-10.0")],
)
def test_a_number_that_is_rounded_up_to_the_next_power_of_ten_has_no_digit_more(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1.0, ("1.00×", "the same")),
        (1.0049, ("1.00×", "the same")),
        (1.005, ("1.00×", "the same")),  # below 1.005 in binary
        (1.0051, ("1.01×", "up")),
        (1 / 1.0051, ("1.01×", "down")),
        (9.994, ("9.99×", "up")),
        (9.996, ("10.0×", "up")),
        (10.04, ("10.0×", "up")),
        (1 / 9.996, ("10.0×", "down")),
        (123.4, ("123.4×", "up")),
        (0.0, ("–", "")),
        (math.inf, ("–", "")),
        (math.nan, ("–", "")),
    ],
)
def test_a_factor_and_its_word(ratio: float, told: tuple[str, str]) -> None:
    assert ratio_text(ratio, "up", "down") == told


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-6, 1e6))
def test_a_factor_of_one_has_never_the_word_of_a_change(ratio: float) -> None:
    factor, word = ratio_text(ratio, "up", "down")
    assert (factor == "1.00×") == (word == "the same")
    assert float(factor[:-1]) >= 1
    if word != "the same":
        assert word == ("up" if ratio > 1 else "down")
