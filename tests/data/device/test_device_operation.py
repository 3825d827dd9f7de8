"""What all operations check."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from lightning_speedkit.data.device.device_operation import (
    ImageOperation,
    check_images,
    checked_number,
    checked_pair,
    draw_below,
    draw_chosen,
    is_channels_last,
)


@pytest.mark.parametrize(
    ("images", "error", "words"),
    [
        ([1, 2], TypeError, "batch[0] is a list"),
        (None, TypeError, "batch[0] is a NoneType"),
        (torch.zeros(4, 3, 8), ValueError, "batch[0] has the shape (4, 3, 8)"),
        (torch.zeros(2, 4, 3, 8, 8), ValueError, "(batch, channels, height, width)"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.int64), TypeError, "batch[0] is torch.int64"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.bool), TypeError, "uint8 from 0 to 255, or floats from 0 to 1"),
    ],
)
def test_what_is_no_batch_of_images(images: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        check_images(images, "batch[0]")
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_one(dtype: torch.dtype) -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=dtype)
    assert check_images(images) is images


def test_the_memory_format_is_recognised() -> None:
    images = torch.zeros(2, 3, 4, 5)
    assert not is_channels_last(images)
    assert is_channels_last(images.contiguous(memory_format=torch.channels_last))
    assert is_channels_last(torch.zeros(2, 4, 5, 3).permute(0, 3, 1, 2))
    assert not is_channels_last(torch.zeros(2, 1, 4, 5).contiguous(memory_format=torch.channels_last))  # it is both
    assert not is_channels_last(torch.zeros(3, 4))


def test_integers_below_limits() -> None:
    limits = torch.tensor([1, 2, 5]).repeat(20_000, 1)
    drawn = draw_below(limits, torch.Generator().manual_seed(1))
    assert drawn.dtype == torch.int64
    for column, limit in enumerate((1, 2, 5)):
        counts = Counter(drawn[:, column].tolist())
        assert set(counts) == set(range(limit))
        deviation = math.sqrt(20_000 * (1 / limit) * (1 - 1 / limit))
        assert max(abs(count - 20_000 / limit) for count in counts.values()) <= 5 * deviation


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, TypeError) for value in (True, "1", None)),
        *((value, ValueError) for value in (math.nan, math.inf, -0.1, 1.1)),
    ],
)
def test_a_number_out_of_bounds(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="probability must be"):
        checked_number("probability", value, 0, 1)


def test_bounds_belong_to_the_range_unless_the_ends_are_open() -> None:
    assert [checked_number("p", value, 0, 1) for value in (0, 0.5, 1)] == [0, 0.5, 1]
    for value in (0, 1):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            checked_number("p", value, 0, 1, open_ends=True)


@pytest.mark.parametrize("value", [1.0, True, "12", (1,), (1, 2, 3), (1, 2.0), (1, True), None])
def test_what_is_no_pair(value: Any) -> None:
    with pytest.raises(TypeError, match="size must be an int, or two"):
        checked_pair("size", value, 1)


def test_pairs() -> None:
    assert checked_pair("size", 3, 1) == checked_pair("size", [3, 3], 1) == (3, 3)
    assert checked_pair("size", (3, 4), 1) == (3, 4)
    with pytest.raises(ValueError, match="size must be at least 1"):
        checked_pair("size", (3, 0), 1)


def test_an_operation_is_printed_as_its_call() -> None:
    class Shift(ImageOperation):
        def __init__(self, by: int) -> None:
            self.by = by
            self._cache = {}

        def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
            return images + self.by

    assert repr(Shift(3)) == "Shift(by=3)"


def test_as_many_are_chosen_as_the_probability_says() -> None:
    images = torch.zeros(20_000, 1, 1, 1)
    assert int(draw_chosen(images, 0.0, None).sum()) == 0
    assert int(draw_chosen(images, 1.0, None).sum()) == len(images)
    for probability in (0.1, 0.5):
        chosen = draw_chosen(images, probability, torch.Generator().manual_seed(1))
        assert (chosen.shape, chosen.dtype) == ((20_000,), torch.bool)
        spread = math.sqrt(20_000 * probability * (1 - probability))
        assert abs(int(chosen.sum()) - 20_000 * probability) < 5 * spread
