"""A field of encoded pictures that a loader decodes straight into its batch, cropped and resized to one size.

What it does: JPEG, PNG and WebP stay encoded in the store; what comes out is uint8, all of one size, in channels-last
memory.
When it helps: photographs, whose decoded form takes many times the disk space and the reading.
What it costs: the decoding, in every epoch. Where the store fits into memory decoded and the pictures need no random
crop, storing them resized as uint8 arrays is faster.

Source: the random-resized crop is that of Szegedy et al., Going Deeper with Convolutions (2015), section 6.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_speedkit.data.images.image_decoders import DECODERS, check_decoder, decode_picture
from lightning_speedkit.data.images.image_geometry import (
    Box,
    center_box,
    dct_reduction,
    random_box,
    reduced_box,
    resize_into,
)
from lightning_speedkit.data.images.image_header import MAX_PIXELS, read_image_header

__all__ = ["ImageField"]

_CROPS = ("resize", "center", "random")
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class ImageField:
    """How the encoded pictures of one field of a store become equal rows of a uint8 batch.

    The whole picture is decoded (a JPEG at 1/2, 1/4 or 1/8 of its size if the part that is used is at least that many
    times the target), a part of it is chosen, and that part is resized by an antialiased bilinear filter. The pixels do
    not depend on which library decodes, within the tolerance that ``docs/methods/images.md`` states.

    Args:
        size: height and width of what comes out, in pixels; one number for a square.
        crop: ``"resize"``: the whole picture, stretched to ``size``. ``"center"``: the largest centred part with the
            proportions of ``size``. ``"random"``: a part drawn anew each time, for training.
        scale: for ``"random"``, the smallest and largest share of the picture's area.
        ratio: for ``"random"``, the smallest and largest width : height of the part, before it is resized.
        channels: 3 for RGB, 1 for grey.
        decoder: ``"simplejpeg"``, ``"opencv"``, ``"torchvision"`` or ``"pillow"``; ``"auto"`` takes for each format the
            fastest that is installed.

    Raises:
        MissingExtraError: the decoder is not installed; for ``"auto"``, none is.

    Example::

        >>> import io
        >>> import numpy as np
        >>> from PIL import Image
        >>> from lightning_speedkit.data import ImageField
        >>> file = io.BytesIO()
        >>> Image.fromarray(np.full((300, 400, 3), 128, np.uint8)).save(file, "PNG")
        >>> field = ImageField(224, crop="random")
        >>> picture = field(file.getvalue(), np.random.default_rng(0))
        >>> picture.shape, picture.dtype, picture.stride(), int(picture.min()), int(picture.max())
        (torch.Size([3, 224, 224]), torch.uint8, (1, 672, 3), 128, 128)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        crop: str = "resize",
        scale: tuple[float, float] = _SCALE,
        ratio: tuple[float, float] = _RATIO,
        channels: int = 3,
        decoder: str = "auto",
    ) -> None:
        self.size = _size(size)
        self.crop = _one_of("crop", crop, _CROPS)
        self.scale = _range("scale", scale, 1.0)
        self.ratio = _range("ratio", ratio, math.inf)
        if isinstance(channels, bool) or channels not in (1, 3):
            raise ValueError(f"channels must be 3 (RGB) or 1 (grey), got {channels!r}.")
        self.channels = int(channels)
        self.decoder = _one_of("decoder", decoder, ("auto", *DECODERS))
        if crop != "random" and (self.scale, self.ratio) != (_SCALE, _RATIO):
            raise ValueError(f"scale and ratio have no effect with crop={crop!r}; use crop='random' or leave them out.")
        check_decoder(decoder)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what :meth:`decode_into` fills."""
        return *self.size, self.channels

    @property
    def random(self) -> bool:
        """Whether decoding draws random numbers, and so needs ``rng``."""
        return self.crop == "random"

    def decode_into(
        self, data: bytes | memoryview, out: npt.NDArray[np.uint8], rng: np.random.Generator | None = None
    ) -> None:
        """Decode one picture into a row of a batch.

        Args:
            data: the encoded picture.
            out: uint8 of :attr:`shape` (height, width, channels), writable; all of it is written.
            rng: where the random numbers come from; needed if :attr:`random`, else left alone.

        Raises:
            ImageError: the bytes are no JPEG, PNG or WebP, or cannot be decoded; what ``out`` holds then is undefined.
        """
        if out.shape != self.shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 of shape {self.shape}, got {out.dtype} of shape {out.shape}.")
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1 or not view.contiguous:
            view = view.cast("B")
        header = read_image_header(view)
        box = self._part(header.height, header.width, rng)
        reduction = dct_reduction(box, self.size) if header.format == "JPEG" and header.components < 4 else 1
        if reduction > 1:
            box = reduced_box(box, header.height, header.width, reduction, self.size)
        picture = decode_picture(view, header, self.channels, reduction, self.decoder)
        top, left, height, width = box
        resize_into(picture[top : top + height, left : left + width], out)

    def __call__(self, data: bytes | memoryview, rng: np.random.Generator | None = None) -> torch.Tensor:
        """One decoded picture as a uint8 tensor (channels, height, width), in channels-last memory."""
        out = np.empty(self.shape, np.uint8)
        self.decode_into(data, out, rng)
        return torch.from_numpy(out).permute(2, 0, 1)

    def _part(self, height: int, width: int, rng: np.random.Generator | None) -> Box:
        if self.crop == "resize":
            return Box(0, 0, height, width)
        if self.crop == "center":
            return center_box(height, width, self.size)
        if rng is None:
            raise ValueError(
                "crop='random' draws from the generator it is given: pass rng=numpy.random.default_rng(...)."
            )
        return random_box(height, width, self.scale, self.ratio, rng)

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("size", "crop", "scale", "ratio", "channels", "decoder")}

    def __eq__(self, other: object) -> bool:
        return self._arguments() == other._arguments() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._arguments().values()))

    def __repr__(self) -> str:
        told = self._arguments()
        size = told.pop("size")
        if self.crop != "random":
            del told["scale"], told["ratio"]
        return f"ImageField({size}, {', '.join(f'{name}={value!r}' for name, value in told.items())})"


def _size(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Iterable) and not isinstance(size, str) else (size, size)
    try:
        height, width = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        height = width = 0
    if any(isinstance(side, bool) for side in sides) or height < 1 or width < 1:
        raise ValueError(f"size must be the height and width in pixels, or one integer above 0 for both, got {size!r}.")
    if height * width > MAX_PIXELS:
        raise ValueError(f"size={size!r} is more than {MAX_PIXELS} pixels.")
    return height, width


def _range(name: str, value: Any, most: float) -> tuple[float, float]:
    wanted = f"two numbers, 0 < low <= high{'' if most == math.inf else f' <= {most:g}'}"
    try:
        low, high = (float(number) for number in value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high <= most or high == math.inf:
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return low, high


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.5)
    known = (*near, *(word for word in known if word not in near))
    raise ValueError(f"{name} must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {value!r}.")
