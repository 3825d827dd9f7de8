"""Pixels to normalised floats, a whole batch at a time, on the device.

What it does: ``(pixels / 255 - mean) / std`` in float32, bit for bit as written here. Images travel to the device as
uint8, a quarter of the bytes of float32, and become floats there.
When it helps: nearly always; it takes the conversion off the loader's workers and off the bus.
What it costs: a pass over the batch on the device for each step of the formula.

Source: LeCun et al., Efficient BackProp, 1998 (inputs of mean 0 and deviation 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.data.device.device_operation import ImageOperation, check_images, checked_number

__all__ = ["Normalize", "normalize_images"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def normalize_images(
    images: Tensor, mean: Tensor | float = 0.0, std: Tensor | float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(images / 255 - mean) / std`` for uint8, ``(images - mean) / std`` for floats; computed in float32.

    Args:
        images: ``(batch, channels, height, width)``, uint8 from 0 to 255, or floats from 0 to 1.
        mean: Of pixels from 0 to 1; a number, or a float32 tensor that broadcasts against the images.
        std: Likewise.
        dtype: Of the result, to which the float32 values are rounded.

    >>> normalize_images(torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2), 0.5, 0.25).flatten()
    tensor([-2.,  2.])
    """
    check_images(images)
    if images.dtype == torch.uint8:
        values = images.to(torch.float32).div_(255).sub_(mean)  # in place: the float32 copy is our own
    else:
        values = images.to(torch.float32) - mean
    return values.div_(std).to(dtype)


class Normalize(ImageOperation):
    """Images as floats of mean 0 and deviation 1; with the default arguments as floats from 0 to 1.

    Args:
        mean: Of pixels from 0 to 1, one number or one for each channel.
        std: Likewise, above 0.
        dtype: Of the result: ``"float32"``, or ``"float16"`` or ``"bfloat16"`` for a model that takes nothing else.
            Mixed precision takes float32.

    >>> images = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    >>> Normalize(mean=[0.5, 0.5, 0.0], std=[0.5, 0.25, 1.0])(images).flatten()
    tensor([1., 2., 1.])
    """

    def __init__(
        self, mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0, dtype: str = "float32"
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(repr, _DTYPES))}, got {dtype!r}.")
        self.mean = _numbers("mean", mean)
        self.std = _numbers("std", std, above_zero=True)
        if len({len(numbers) for numbers in (self.mean, self.std)} - {1}) > 1:
            raise ValueError(f"mean has {len(self.mean)} and std {len(self.std)} numbers: give one for each channel.")
        self.dtype = dtype
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @override
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_images(images)
        channels = max(len(self.mean), len(self.std))
        if channels not in (1, images.shape[1]):
            raise ValueError(f"{self!r} is for {channels} channels, got images of shape {tuple(images.shape)}.")
        if images.dtype == torch.uint8 and max(self.mean) > 1:
            raise ValueError(
                f"mean must be that of pixels from 0 to 1, got {list(self.mean)}: divide it, and std, by 255."
            )
        return normalize_images(images, *self._on(images.device), _DTYPES[self.dtype])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Kept for each device: making a tensor there anew would wait for the device in every batch.
        if device not in self._constants:
            both = [
                torch.tensor(x, device=device, dtype=torch.float32).reshape(-1, 1, 1) for x in (self.mean, self.std)
            ]
            self._constants[device] = both[0], both[1]
        return self._constants[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_constants": {}}


def _numbers(name: str, value: float | Sequence[float], *, above_zero: bool = False) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not numbers:
        raise ValueError(f"{name} must be a number, or one for each channel; got none.")
    least = 0.0 if above_zero else float("-inf")
    return tuple(checked_number(name, number, least, open_ends=True) for number in numbers)
