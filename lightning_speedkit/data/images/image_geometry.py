"""Which part of a picture is used, how far a JPEG may be reduced while it is decoded, and the resizing.

What it does: pure integer geometry for the crops of :class:`~lightning_speedkit.data.ImageField`, and one filter for
all of them, antialiased bilinear (a triangle as wide as the picture shrinks), which is what "bilinear" means in Pillow
and in torchvision. torch has it for uint8 in channels-last memory, with vector instructions and without the GIL, so
that the result does not depend on which image library is installed.
What it costs: of the filters that do not alias it was the cheapest; OpenCV's ``INTER_AREA`` takes several times as long
for the usual factors. OpenCV's ``INTER_LINEAR`` is cheaper and skips pixels as soon as the picture shrinks.

Source: the random-resized crop is that of Szegedy et al., Going Deeper with Convolutions (2015), section 6; reducing in
the DCT is a feature of libjpeg (``scale_denom``).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Box", "center_box", "dct_reduction", "random_box", "reduced_box", "resize_into"]

Pixels = npt.NDArray[np.uint8]
_ATTEMPTS = 10
_LEAST_SIDE = 8  # below this, the scales of a JPEG decoder can give the same size


class Box(NamedTuple):
    """A part of a picture, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


def center_box(height: int, width: int, size: tuple[int, int]) -> Box:
    """The largest centred part with the proportions of ``size`` (height, width), to within half a pixel.

    >>> center_box(400, 600, (224, 224))
    Box(top=0, left=100, height=400, width=400)
    """
    box_height = min(height, max(1, round(width * size[0] / size[1])))
    box_width = min(width, max(1, round(height * size[1] / size[0])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Box:
    """A part whose share of the area is uniform in ``scale``, and the logarithm of width : height in that of ``ratio``.

    What does not fit into the picture is drawn again, ten times; after that it is the largest centred part whose
    proportions lie within ``ratio``.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_ATTEMPTS):
        share, proportion, down, right = rng.random(4).tolist()
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        aspect = math.exp(low + proportion * (high - low))
        box_height, box_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < box_height <= height and 0 < box_width <= width:
            top, left = int(down * (height - box_height + 1)), int(right * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    return center_box(height, width, _proportions(aspect))


def _proportions(aspect: float) -> tuple[int, int]:
    return 1 << 20, max(1, round(aspect * (1 << 20)))


def dct_reduction(box: Box, size: tuple[int, int]) -> int:
    """By how much a JPEG can be reduced while it is decoded (1, 2, 4 or 8) so that the part is still no smaller than
    ``size`` (height, width).

    >>> dct_reduction(Box(0, 0, 448, 900), (224, 224)), dct_reduction(Box(0, 0, 447, 900), (224, 224))
    (2, 1)
    """
    height, width = size
    if box.height < 2 * height or box.width < 2 * width or min(size) < _LEAST_SIDE:
        return 1
    return next(n for n in (8, 4, 2) if box.height >= n * height and box.width >= n * width)


def reduced_box(box: Box, height: int, width: int, reduction: int, size: tuple[int, int]) -> Box:
    """The part in the reduced picture: whole pixels of it, each of which covers ``reduction`` x ``reduction`` pixels of
    the picture of ``height`` x ``width``.

    Each edge is within one reduced pixel of where it was, and the part stays no smaller than ``size``. A last row or
    column that the picture fills only in part is left out.

    >>> reduced_box(Box(1, 30, 448, 601), 450, 640, 2, (224, 224))
    Box(top=0, left=15, height=224, width=301)
    """
    top, bottom = _reduced_edges(box.top, box.height, height, reduction, size[0])
    left, right = _reduced_edges(box.left, box.width, width, reduction, size[1])
    return Box(top, left, bottom - top, right - left)


def _reduced_edges(start: int, length: int, whole: int, reduction: int, least: int) -> tuple[int, int]:
    end = min(round((start + length) / reduction), whole // reduction)
    return max(0, min(round(start / reduction), end - least)), end


def resize_into(picture: Pixels, out: Pixels) -> None:
    """Resize a picture (H, W, C), which may be a part of another, into all of ``out`` (H, W, C)."""
    if picture.shape == out.shape:
        np.copyto(out, picture)
        return
    if min(*picture.shape[:2], *out.shape[:2]) == 1:
        _resize_thin(picture, out)
        return
    resize: Any = torch.ops.aten._upsample_bilinear2d_aa.out  # interpolate() has no out=, and takes twice as long
    resize(_as_batch(picture), out.shape[:2], False, None, None, out=_as_batch(out))


def _resize_thin(picture: Pixels, out: Pixels) -> None:
    if out.shape[1] == 1 < out.shape[0]:  # of one column, torch (2.13) fills all rows with the first: on its side, then
        picture, out = picture.transpose(1, 0, 2), out.transpose(1, 0, 2)
    planes = torch.from_numpy(picture.transpose(2, 0, 1)[None].astype(np.float32))
    resized = torch.nn.functional.interpolate(planes, out.shape[:2], mode="bilinear", antialias=True)
    np.copyto(out, resized[0].round().to(torch.uint8).permute(1, 2, 0).numpy())


def _as_batch(picture: Pixels) -> torch.Tensor:
    # the batch dimension is NumPy's: with torch's own, the strides do not count as channels-last
    return torch.from_numpy(picture[None]).permute(0, 3, 1, 2)
