"""Photographs, their encoded forms, and the decoders that are installed, for the tests of pictures."""

from __future__ import annotations

import functools
import importlib.util
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from lightning_speedkit.data.images.image_decoders import DECODERS

Pixels = npt.NDArray[np.uint8]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(DECODERS[name].module.partition(".")[0]) is not None


def needs(name: str) -> pytest.MarkDecorator:
    """A test that needs the library of that decoder."""
    return pytest.mark.skipif(not _installed(name), reason=f"{DECODERS[name].distribution} is not installed")


def decoder_parameters(format_: str) -> list[Any]:
    """A test parameter per decoder that reads the format, skipped where its library is not installed."""
    return [pytest.param(name, marks=needs(name)) for name, d in DECODERS.items() if format_ in d.formats]


def installed_decoders(format_: str) -> list[str]:
    return [name for name, d in DECODERS.items() if format_ in d.formats and _installed(name)]


@functools.cache
def photographs() -> tuple[Pixels, Pixels]:
    """A temple and a flower, each 427 x 640 pixels, RGB."""
    china, flower = load_sample_images().images
    return china.copy(), flower.copy()  # they come read-only


def encoded(pixels: Any, format_: str, **options: Any) -> bytes:
    """The pixels, or a Pillow image, as the bytes of a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.ascontiguousarray(pixels))
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def differences(first: Any, second: Any) -> tuple[float, int]:
    """Mean and largest absolute difference."""
    assert first.shape == second.shape
    apart = np.abs(np.asarray(first, np.int64) - np.asarray(second, np.int64))
    return float(apart.mean()), int(apart.max())
