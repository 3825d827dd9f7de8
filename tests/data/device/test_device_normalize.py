"""Normalisation: the documented formula to the last bit, on every dtype and memory format."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_speedkit.data.device.device_normalize import Normalize, normalize_images

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def every_pixel(channels: int = 3) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, channels, 1, 1)


def test_uint8_is_divided_by_255_bit_for_bit() -> None:
    images = every_pixel()
    mean, std = (torch.tensor(numbers).reshape(1, 3, 1, 1) for numbers in (MEAN, STD))
    expected = (images.float() / 255 - mean) / std
    assert torch.equal(Normalize(MEAN, STD)(images), expected)
    # and by hand, in double precision: pixel 128 of channel 0 is (128 / 255 - 0.485) / 0.229
    assert Normalize(MEAN, STD)(images)[0, 0, 8, 0].item() == pytest.approx((128 / 255 - 0.485) / 0.229, abs=1e-6)


def test_floats_are_not_divided() -> None:
    images = torch.tensor([0.0, 0.25, 0.5, 1.0]).reshape(1, 1, 2, 2)
    assert Normalize(0.5, 0.25)(images).flatten().tolist() == [-2.0, -1.0, 0.0, 2.0]
    assert Normalize(0.5, 0.25)(images.double()).dtype == torch.float32


@pytest.mark.parametrize("pixels", [every_pixel(), every_pixel() / 255])
def test_the_default_only_makes_floats(pixels: torch.Tensor) -> None:
    assert torch.equal(Normalize()(pixels), every_pixel().float() / 255)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_smaller_dtype_is_the_rounded_result(dtype: str) -> None:
    full, small = Normalize(MEAN, STD)(every_pixel()), Normalize(MEAN, STD, dtype)(every_pixel())
    assert small.dtype == getattr(torch, dtype)
    assert torch.equal(small, full.to(small.dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_memory_format_and_input_are_kept(dtype: torch.dtype) -> None:
    images = every_pixel().to(dtype)
    for given in (images, images.contiguous(memory_format=torch.channels_last)):
        before = given.clone()
        result = Normalize(MEAN, STD)(given)
        assert torch.equal(given, before)
        assert result.stride() == given.stride()
        assert result.data_ptr() != given.data_ptr()


def test_one_number_for_all_channels_or_one_for_each() -> None:
    images = every_pixel()
    assert torch.equal(Normalize(0.5, STD)(images), Normalize([0.5] * 3, STD)(images))
    assert torch.equal(Normalize(0.5, 0.25)(every_pixel(4)), Normalize([0.5] * 4, [0.25] * 4)(every_pixel(4)))
    assert torch.equal(normalize_images(images, 0.5, 0.25), Normalize(0.5, 0.25)(images))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"std": 0.0}, ValueError, "std must be finite, above 0"),
        ({"std": [1.0, -1.0]}, ValueError, "std must be finite, above 0"),
        ({"mean": "0.5"}, TypeError, "mean must be a number"),
        ({"mean": [True]}, TypeError, "mean must be a number"),
        ({"mean": []}, ValueError, "got none"),
        ({"mean": [0.1, 0.2], "std": [1.0, 1.0, 1.0]}, ValueError, "mean has 2 and std 3 numbers"),
        ({"dtype": "float64"}, ValueError, "dtype must be one of 'float32', 'float16', 'bfloat16'"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Normalize(**arguments)


def test_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"for 3 channels, got images of shape \(2, 1, 16, 16\)"):
        Normalize(MEAN, STD)(every_pixel(1))
    with pytest.raises(ValueError, match="divide it, and std, by 255"):
        Normalize([123.675, 116.28, 103.53], [58.4, 57.1, 57.4])(every_pixel())
    with pytest.raises(TypeError, match=r"torch\.int64"):
        Normalize()(every_pixel().long())


def test_it_is_pickled_without_what_it_keeps_on_devices() -> None:
    operation = Normalize(MEAN, STD)
    expected = operation(every_pixel())
    assert operation._constants
    copy = pickle.loads(pickle.dumps(operation))
    assert copy._constants == {}
    assert repr(copy) == repr(operation) == f"Normalize(mean={tuple(MEAN)}, std={tuple(STD)}, dtype='float32')"
    assert torch.equal(copy(every_pixel()), expected)
