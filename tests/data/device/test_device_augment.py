"""Crop, flip and erase: each batch against a loop over its samples, and the distribution of what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_speedkit.data.device.device_augment import (
    RandomCrop,
    RandomErase,
    RandomFlip,
    crop_images,
    erase_images,
    flip_images,
)
from lightning_speedkit.data.device.device_operation import ImageOperation

FORMATS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.uint8, torch.float32, torch.bfloat16]


def pixels(
    count: int = 6,
    channels: int = 3,
    height: int = 7,
    width: int = 9,
    dtype: torch.dtype = torch.uint8,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    drawn = torch.randint(0, 256, (count, channels, height, width), generator=seeded(0), dtype=torch.uint8)
    return (drawn if dtype == torch.uint8 else (drawn / 255).to(dtype)).contiguous(memory_format=memory_format)


def many(count: int, height: int, width: int) -> torch.Tensor:
    """A batch of which only the shape is looked at, in a single byte of memory."""
    return torch.zeros(1, dtype=torch.uint8).expand(count, 1, height, width)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cropped_by_hand(image: np.ndarray, top: int, left: int, size: tuple[int, int], padding: tuple[int, int]) -> Any:
    padded = np.pad(image, ((0, 0), (padding[0],) * 2, (padding[1],) * 2))
    return padded[:, top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("size", "padding"), [((7, 9), (2, 2)), ((4, 5), (0, 0)), ((5, 11), (0, 1)), ((1, 1), (3, 0))])
def test_crops_are_those_of_a_loop(
    dtype: torch.dtype, memory_format: torch.memory_format, size: tuple[int, int], padding: tuple[int, int]
) -> None:
    images = pixels(dtype=dtype, memory_format=memory_format)
    corners = RandomCrop(size, padding).draw(images, seeded(3))
    result = RandomCrop(size, padding)(images, seeded(3))
    expected = [
        cropped_by_hand(image.numpy(), *corner.tolist(), size, padding)
        for image, corner in zip(images, corners, strict=True)
    ]
    np.testing.assert_array_equal(result.numpy(), np.stack(expected))


def test_bfloat16_is_cropped_too() -> None:
    images = pixels(dtype=torch.bfloat16)
    corners = torch.tensor([[i % 3, i % 5] for i in range(6)])
    result = crop_images(images, corners, (5, 5))
    for i, (top, left) in enumerate(corners.tolist()):
        assert torch.equal(result[i], images[i, :, top : top + 5, left : left + 5])


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("direction", "axis"), [("horizontal", 2), ("vertical", 1)])
def test_flips_are_those_of_a_loop(
    direction: str, axis: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    images = pixels(dtype=dtype, memory_format=memory_format)
    operation = RandomFlip(0.5, direction)
    flipped = operation.draw(images, seeded(1))
    assert 0 < flipped.sum() < 6
    result = operation(images, seeded(1))
    for i in range(6):
        expected = images[i].flip(axis) if flipped[i] else images[i]
        assert torch.equal(result[i], expected)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_erased_boxes_are_those_of_a_loop(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    images = pixels(dtype=dtype, memory_format=memory_format)
    operation = RandomErase(0.7, (0.1, 0.5), (0.5, 2.0), value=1)
    boxes = operation.draw(images, seeded(5))
    assert 0 < int((boxes[:, 2] > 0).sum()) < 6
    result, expected = operation(images, seeded(5)), images.clone()
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        for row in range(top, top + height):
            for column in range(left, left + width):
                expected[i, :, row, column] = 1
    assert torch.equal(result, expected)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("operation", [RandomCrop((7, 9), 2), RandomCrop(4), RandomFlip(), RandomErase()])
def test_memory_format_dtype_and_input_are_kept(operation: ImageOperation, memory_format: torch.memory_format) -> None:
    for dtype in DTYPES:
        images = pixels(dtype=dtype, memory_format=memory_format)
        before = images.clone()
        result = operation(images, seeded(0))
        assert result.is_contiguous(memory_format=memory_format)
        assert result.dtype == dtype
        assert torch.equal(images, before)
        assert result.untyped_storage().data_ptr() != images.untyped_storage().data_ptr()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), st.integers(0, 3), st.integers(0, 99)
)
def test_any_shape(count: int, channels: int, height: int, width: int, padding: int, seed: int) -> None:
    images = pixels(count, channels, height, width)
    size = (1 + seed % (height + 2 * padding), 1 + seed % (width + 2 * padding))
    corners = RandomCrop(size, padding).draw(images, seeded(seed))
    result = crop_images(images, corners, size, (padding, padding))
    for image, corner, crop in zip(images, corners, result, strict=True):
        expected = cropped_by_hand(image.numpy(), *corner.tolist(), size, (padding, padding))
        np.testing.assert_array_equal(crop.numpy(), expected)
    boxes = RandomErase(1.0, (0.02, 1.0), (0.1, 9.0)).draw(images, seeded(seed))
    assert bool((boxes >= 0).all())
    assert bool((boxes[:, :2] + boxes[:, 2:] <= torch.tensor([height, width])).all())


def test_every_place_of_a_crop_is_as_likely_as_any_other() -> None:
    corners = RandomCrop((32, 30), padding=(1, 2)).draw(many(30_000, 32, 32), seeded(7))
    counts = Counter(map(tuple, corners.tolist()))
    assert set(counts) == {(top, left) for top in range(3) for left in range(7)}
    assert stats.chisquare(list(counts.values())).pvalue > 0.001


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_how_often_is_flipped_and_erased(probability: float) -> None:
    images, allowed = many(20_000, 64, 64), 5 * math.sqrt(20_000 * probability * (1 - probability))
    flipped = RandomFlip(probability).draw(images, seeded(2)).sum()
    erased = (RandomErase(probability, (0.1, 0.2)).draw(images, seeded(2))[:, 2] > 0).sum()
    assert abs(int(flipped) - 20_000 * probability) <= allowed
    assert abs(int(erased) - 20_000 * probability) <= allowed


def test_erased_area_aspect_and_place_are_spread_as_documented() -> None:
    # boxes of at most a tenth of a large image fit with every allowed aspect: no draw is repeated
    boxes = RandomErase(1.0, (0.02, 0.1), (0.3, 3.3)).draw(many(20_000, 2000, 2000), seeded(4)).double()
    top, left, height, width = boxes.unbind(1)
    area, aspect = height * width / 2000**2, height / width
    assert stats.kstest(area, stats.uniform(0.02, 0.08).cdf).pvalue > 0.001
    low, high = math.log(0.3), math.log(3.3)
    assert stats.kstest(aspect.log(), stats.uniform(low, high - low).cdf).pvalue > 0.001
    for start, side in ((top, height), (left, width)):
        # the middle of its unit interval, as a share of the places that there are
        assert stats.kstest((start + 0.5) / (2001 - side), stats.uniform().cdf).pvalue > 0.001


def test_boxes_that_do_not_fit_are_drawn_again_or_nothing_is_erased() -> None:
    flat = many(2000, 4, 400)  # of all boxes with more than half of the area, only those as flat as this image fit
    boxes = RandomErase(1.0, (0.5, 0.9), (0.005, 1.0)).draw(flat, seeded(1))
    share = boxes[:, 2] * boxes[:, 3] / 1600
    erased = share > 0
    assert int(erased.sum()) > 0
    assert bool((share[erased] > 0.3).all())  # rounding to whole rows of four
    none = RandomErase(1.0, (0.9, 0.9), (1.0, 1.0)).draw(flat, seeded(1))
    assert not none.any()


def test_samples_of_a_batch_differ() -> None:
    images = pixels(1).expand(64, -1, -1, -1)
    for operation in (RandomCrop((7, 9), 2), RandomFlip(), RandomErase()):
        result = operation(images, seeded(0))
        assert len({sample.numpy().tobytes() for sample in result}) > 1


def test_the_given_generator_alone_decides() -> None:
    images = pixels()
    for operation in (RandomCrop((7, 9), 2), RandomFlip(), RandomErase()):
        before = torch.get_rng_state()
        first = operation(images, seeded(11))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        assert torch.equal(operation(images, seeded(11)), first)
        assert any(not torch.equal(operation(images, seeded(seed)), first) for seed in range(5))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RandomCrop(0), ValueError, "size must be at least 1"),
        (lambda: RandomCrop(4.0), TypeError, "size must be an int"),
        (lambda: RandomCrop(4, -1), ValueError, "padding must be at least 0"),
        (lambda: RandomFlip(1.5), ValueError, "probability must be finite, at least 0 and at most 1"),
        (lambda: RandomFlip(True), TypeError, "probability must be a number"),
        (lambda: RandomFlip(direction="left"), ValueError, "direction must be one of 'horizontal', 'vertical'"),
        (lambda: RandomErase(-1.0), ValueError, "probability"),
        (lambda: RandomErase(area=(0.5, 0.1)), ValueError, "the least and the largest"),
        (lambda: RandomErase(area=(0.5, 1.1)), ValueError, "at most 1"),
        (lambda: RandomErase(area=(0.0, 0.5)), ValueError, "above 0"),
        (lambda: RandomErase(area=0.3), TypeError, "area must be two numbers"),
        (lambda: RandomErase(aspect=(1.0, 2.0, 3.0)), TypeError, "aspect must be two numbers"),
        (lambda: RandomErase(value="random"), TypeError, "value must be a number"),
    ],
)
def test_arguments_that_are_wrong(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"RandomCrop\(size=\(12, 12\), padding=\(2, 2\)\) is larger than the padded"):
        RandomCrop(12, 2)(pixels())
    for value in (0.5, -1, 256):
        with pytest.raises(ValueError, match="value must be a whole number from 0 to 255"):
            RandomErase(value=value)(pixels())
        RandomErase(value=value)(pixels(dtype=torch.float32))
    for operation in (RandomCrop(2), RandomFlip(), RandomErase()):
        with pytest.raises(ValueError, match=r"shape \(6, 3\)"):
            operation(torch.zeros(6, 3))


def test_the_functions_take_parameters_of_their_own() -> None:
    images = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert flip_images(images, torch.tensor([True]), "vertical")[0, 0, 0].tolist() == [6, 7, 8]
    assert erase_images(images, torch.tensor([[1, 1, 2, 1]]), -1).flatten().tolist() == [0, 1, 2, 3, -1, 5, 6, -1, 8]
    assert crop_images(images, torch.tensor([[1, 2]]), (2, 1)).flatten().tolist() == [5, 8]
