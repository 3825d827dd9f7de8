"""Random crops, flips and erased boxes, a whole batch at a time, each sample with its own.

What it does: the parameters of all samples are drawn at once, on the device, and applied in a few kernels. Pixels are
moved or overwritten, never computed, so it works on uint8 as on floats and gives exactly what one image alone gives.
When it helps: augmentation in the loader's workers costs CPU time for each sample, and here it costs the device a few
passes over a uint8 batch.
What it costs: one copy of the batch for each operation, and one more for the padding of a crop.

Source: crops and flips as in Krizhevsky et al., 2012; Zhong et al., Random Erasing Data Augmentation, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_speedkit.data.device.device_operation import (
    ImageOperation,
    check_images,
    checked_number,
    checked_pair,
    draw_below,
    draw_chosen,
)

__all__ = [
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "boxes_as_mask",
    "crop_images",
    "erase_images",
    "flip_images",
]

_DIRECTIONS = {"horizontal": 3, "vertical": 2}
_TRIES = 10


def crop_images(images: Tensor, corners: Tensor, size: tuple[int, int], padding: tuple[int, int] = (0, 0)) -> Tensor:
    """From each image the rectangle with its corner, after a border of zeros was put around all.

    Args:
        images: ``(batch, channels, height, width)``, uint8 or floats.
        corners: ``(batch, 2)``, int64 on the same device: top and left of each crop in the padded image.
        size: Height and width of the crops.
        padding: Rows above and below, columns left and right.

    Returns:
        ``(batch, channels, *size)`` of the same dtype and memory format.

    >>> crop_images(torch.arange(4.0).reshape(1, 1, 2, 2), torch.tensor([[0, 1]]), (2, 2), (1, 1))[0, 0]
    tensor([[0., 0.],
            [0., 1.]])
    """
    vertical, horizontal = padding
    if vertical or horizontal:
        images = functional.pad(images, (horizontal, horizontal, vertical, vertical))
    windows = images.unfold(2, size[0], 1).unfold(3, size[1], 1)  # a view: all places that a crop can have
    samples = torch.arange(len(images), device=images.device)
    return windows[samples, :, corners[:, 0], corners[:, 1]]


def flip_images(images: Tensor, flipped: Tensor, direction: str = "horizontal") -> Tensor:
    """The images, those mirrored for which ``flipped``, a bool tensor of shape ``(batch,)``, is true.

    >>> flip_images(torch.arange(4.0).reshape(2, 1, 1, 2), torch.tensor([True, False])).flatten()
    tensor([1., 0., 2., 3.])
    """
    return torch.where(flipped[:, None, None, None], images.flip(_DIRECTIONS[direction]), images)


def erase_images(images: Tensor, boxes: Tensor, value: float = 0) -> Tensor:
    """The images with a box of each filled with a value; a box without height or width erases nothing.

    Args:
        images: ``(batch, channels, height, width)``, uint8 or floats.
        boxes: ``(batch, 4)``, int64 on the same device: top, left, height and width.
        value: In the units of the images.

    >>> erase_images(torch.ones(1, 1, 2, 3), torch.tensor([[0, 1, 2, 1]]))[0, 0]
    tensor([[1., 0., 1.],
            [1., 0., 1.]])
    """
    mask = boxes_as_mask(boxes, images.shape[2], images.shape[3])
    fill = int(value) if images.dtype == torch.uint8 else value
    return images.clone().masked_fill_(mask, fill)  # masked_fill would not keep the memory format


def boxes_as_mask(boxes: Tensor, height: int, width: int) -> Tensor:
    """``(batch, 1, height, width)``, true inside of each sample's box of top, left, height and width."""
    top, left, box_height, box_width = boxes[:, :, None].unbind(1)
    rows, columns = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    inside_rows = (rows >= top) & (rows < top + box_height)
    inside_columns = (columns >= left) & (columns < left + box_width)
    return inside_rows[:, None, :, None] & inside_columns[:, None, None, :]


class RandomCrop(ImageOperation):
    """A rectangle of each image, at a place of its own.

    Args:
        size: Of the crops: one number, or height and width.
        padding: Zeros around the images before: one number, or that above and below, and that left and right. Zeros
            are black in uint8, and the mean after :class:`~lightning_speedkit.data.Normalize`.

    >>> RandomCrop(32, padding=4)(torch.zeros(8, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([8, 3, 32, 32])
    """

    random: ClassVar[bool] = True

    def __init__(self, size: int | Sequence[int], padding: int | Sequence[int] = 0) -> None:
        self.size = checked_pair("size", size, 1)
        self.padding = checked_pair("padding", padding, 0)

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Top and left of each crop in the padded image, ``(batch, 2)``: each place is as likely as any other."""
        room = [images.shape[2 + i] + 2 * self.padding[i] - self.size[i] for i in (0, 1)]
        if min(room) < 0:
            raise ValueError(f"{self!r} is larger than the padded images, whose shape is {tuple(images.shape)} before.")
        shape, device = (len(images), 1), images.device
        drawn = [torch.randint(places + 1, shape, generator=generator, device=device) for places in room]
        return torch.cat(drawn, dim=1)

    @override
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_images(images)
        return crop_images(images, self.draw(images, generator), self.size, self.padding)


class RandomFlip(ImageOperation):
    """Each image mirrored, with a probability.

    Args:
        probability: From 0 to 1.
        direction: ``"horizontal"`` exchanges left and right, ``"vertical"`` top and bottom.

    >>> RandomFlip(probability=1.0)(torch.arange(3.0).reshape(1, 1, 1, 3)).flatten()
    tensor([2., 1., 0.])
    """

    random: ClassVar[bool] = True

    def __init__(self, probability: float = 0.5, direction: str = "horizontal") -> None:
        if direction not in _DIRECTIONS:
            raise ValueError(f"direction must be one of {', '.join(map(repr, _DIRECTIONS))}, got {direction!r}.")
        self.probability = checked_number("probability", probability, 0, 1)
        self.direction = direction

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Which images are mirrored, bool of shape ``(batch,)``."""
        return draw_chosen(images, self.probability, generator)

    @override
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_images(images)
        return flip_images(images, self.draw(images, generator), self.direction)


class RandomErase(ImageOperation):
    """A box of each image overwritten, with a probability.

    The area and the logarithm of the aspect ratio are uniform in their ranges, as far as the box fits into the image:
    what does not fit is drawn again, up to ten times, and then nothing is erased.

    Args:
        probability: From 0 to 1.
        area: The least and the largest share of the image.
        aspect: The least and the largest ratio of height to width.
        value: What the box is filled with, in the units of the images: 0 to 255 for uint8.

    >>> erased = RandomErase(probability=1.0)(torch.ones(4, 3, 32, 32))
    >>> bool(((erased == 0).float().mean(dim=(1, 2, 3)) > 0.01).all())
    True
    """

    random: ClassVar[bool] = True

    def __init__(
        self,
        probability: float = 0.5,
        area: Sequence[float] = (0.02, 0.33),
        aspect: Sequence[float] = (0.3, 3.3),
        value: float = 0,
    ) -> None:
        self.probability = checked_number("probability", probability, 0, 1)
        self.area = _checked_range("area", area, 1)
        self.aspect = _checked_range("aspect", aspect, math.inf)
        self.value = checked_number("value", value, -math.inf)

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Top, left, height and width of each box, ``(batch, 4)``; zeros where nothing is erased."""
        count, device, (height, width) = len(images), images.device, images.shape[2:]
        shares = torch.rand(2, count, _TRIES, generator=generator, device=device, dtype=torch.float32)
        area = (self.area[0] + (self.area[1] - self.area[0]) * shares[0]) * height * width
        least, most = map(math.log, self.aspect)
        aspect = torch.exp(least + (most - least) * shares[1])
        sizes = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()]).round().long()
        fits = (sizes[0] <= height) & (sizes[1] <= width)
        first = fits.byte().argmax(dim=1)
        erased = fits.any(dim=1) & draw_chosen(images, self.probability, generator)
        tall, wide = sizes.gather(2, first.expand(2, -1)[..., None]).squeeze(2) * erased
        top, left = draw_below(height + 1 - tall, generator), draw_below(width + 1 - wide, generator)
        return torch.stack([top, left, tall, wide], dim=1) * erased[:, None]

    @override
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_images(images)
        if images.dtype == torch.uint8 and not (0 <= self.value <= 255 and self.value == int(self.value)):
            raise ValueError(f"value must be a whole number from 0 to 255 for uint8 images, got {self.value}.")
        return erase_images(images, self.draw(images, generator), self.value)


def _checked_range(name: str, value: Sequence[float], most: float) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, the least and the largest; got {value!r}.")
    low, high = (checked_number(name, number, 0) for number in value)
    if not 0 < low <= high <= most:
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be two numbers above 0{upper}, the least and the largest; got {tuple(value)!r}.")
    return low, high
