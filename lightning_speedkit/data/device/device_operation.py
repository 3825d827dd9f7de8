"""What an operation of :class:`~lightning_speedkit.data.DeviceTransform` is, and what all of them check.

An operation takes a whole batch of images, ``(batch, channels, height, width)``, uint8 from 0 to 255 or floats that
mean the same from 0 to 1, on any device. It returns a new tensor in the same memory format and never writes into the
one it was given, which may be memory that a loader uses again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_speedkit.data.argument_checks import a_type

__all__ = [
    "ImageOperation",
    "LabelOperation",
    "check_images",
    "checked_number",
    "checked_pair",
    "draw_below",
    "draw_chosen",
    "is_channels_last",
]


class _Shown:
    """Printed as the call that makes it: the attributes are the constructor's arguments, under their names."""

    def __repr__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(arguments)})"


class ImageOperation(_Shown, ABC):
    """An operation on images alone; subclass it for one of your own that draws from the generator it is given."""

    random: ClassVar[bool] = False
    """Whether it draws numbers; such an operation is for training only."""

    @abstractmethod
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The changed images; a generator of ``None`` is torch's global one."""


class LabelOperation(_Shown, ABC):
    """An operation that mixes images and their labels alike; for training only."""

    @abstractmethod
    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mixed images and the mixed labels; a generator of ``None`` is torch's global one."""


def check_images(images: object, place: str = "images") -> Tensor:
    """The same tensor, if it is a batch of images.

    Raises:
        TypeError: It is no tensor, or neither uint8 nor floating point.
        ValueError: It has not four dimensions.

    >>> check_images(torch.zeros(8, 3), "batch[0]")
    Traceback (most recent call last):
        ...
    ValueError: batch[0] has the shape (8, 3): images have the shape (batch, channels, height, width).
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"{place} is {a_type(images)}: images are a tensor (batch, channels, height, width).")
    if images.ndim != 4:
        raise ValueError(
            f"{place} has the shape {tuple(images.shape)}: images have the shape (batch, channels, height, width)."
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{place} is {images.dtype}: images are uint8 from 0 to 255, or floats from 0 to 1.")
    return images


def is_channels_last(images: Tensor) -> bool:
    """Whether the memory is laid out as (batch, height, width, channels), and not as the shape says."""
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def draw_below(limits: Tensor, generator: torch.Generator | None) -> Tensor:
    """An integer from 0 up to but not including each of ``limits``, int64 of 1 or more.

    >>> draw_below(torch.tensor([1, 1, 1]), None).tolist()
    [0, 0, 0]
    """
    drawn = torch.rand(limits.shape, generator=generator, device=limits.device, dtype=torch.float32)
    return (drawn * limits).long()  # a float32 below 1 times a whole number does not round up to it


def draw_chosen(images: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    """Which samples of a batch are chosen, each with that probability; bool of shape ``(batch,)``.

    >>> draw_chosen(torch.zeros(2, 1, 1, 1), 1.0, None).tolist()
    [True, True]
    """
    return torch.rand(len(images), generator=generator, device=images.device, dtype=torch.float32) < probability


def checked_number(name: str, value: object, least: float, most: float = math.inf, *, open_ends: bool = False) -> float:
    """A finite number between ``least`` and ``most``; ``open_ends`` leaves the two themselves out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value) or not (least < value < most if open_ends else least <= value <= most):
        upper = "" if most == math.inf else f" and {'below' if open_ends else 'at most'} {most:g}"
        raise ValueError(
            f"{name} must be finite, {'above' if open_ends else 'at least'} {least:g}{upper}, got {value}."
        )
    return float(value)


def checked_pair(name: str, value: object, least: int) -> tuple[int, int]:
    """``(vertical, horizontal)`` from one integer for both, or from two."""
    given = value if isinstance(value, list | tuple) else (value, value)
    numbers = [number for number in given if isinstance(number, int) and not isinstance(number, bool)]
    if len(given) != 2 or len(numbers) != 2:
        raise TypeError(f"{name} must be an int, or two: (vertical, horizontal); got {value!r}.")
    if min(numbers) < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}.")
    return numbers[0], numbers[1]
