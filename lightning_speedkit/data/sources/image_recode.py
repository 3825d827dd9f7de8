"""Makes the pictures of samples smaller, once, while they are packed.

When it helps: photographs that are much larger than the size that a model is trained at. Decoding is most of the time
of a training step's data, and it grows with the number of pixels.

What it costs: JPEG is encoded a second time, with the loss of that; one decode and encode per picture, spread over the
threads of the pack. A picture that is small enough and of the wanted kind keeps its bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from lightning_speedkit.data.sources.image_check import image_kind, opened_picture
from lightning_speedkit.errors import SourceError

__all__ = ["ENCODINGS", "ImageRecode"]

ENCODINGS = ("jpeg", "png")
_ORIENTATION = 0x0112
_OF_KIND = {"JPEG": "jpeg", "PNG": "png"}


@dataclass(frozen=True, slots=True)
class ImageRecode:
    """Called with a sample: every ``bytes`` in it that is a picture is made smaller or encoded anew.

    Args:
        size: pixels of the shorter side; a picture that is not larger keeps its size. ``None`` keeps all sizes.
        encoding: ``"jpeg"`` or ``"png"``. ``None`` keeps JPEG and PNG, and turns every other kind into PNG.
        quality: of JPEG, 1 to 95.

    Raises:
        SourceError: when called, for a picture that cannot be decoded, or a sample without one.

    >>> ImageRecode(size=256)
    ImageRecode(size=256, encoding=None, quality=90)
    """

    size: int | None = None
    encoding: str | None = None
    quality: int = 90

    def __post_init__(self) -> None:
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise ValueError(f"size must be an int of at least 1 pixel or None, got {self.size!r}.")
        if self.encoding not in (None, *ENCODINGS):
            raise ValueError(f"encoding must be one of {', '.join(ENCODINGS)} or None, got {self.encoding!r}.")
        if type(self.quality) is not int or not 1 <= self.quality <= 95:
            raise ValueError(f"quality must be an int from 1 to 95, got {self.quality!r}.")

    def __call__(self, sample: Any) -> Any:
        """The sample with its pictures recoded."""
        found: list[str] = []
        changed = self._changed(sample, found)
        if not found:
            raise SourceError("the sample has no picture that could be made smaller or encoded.")
        return changed

    def _changed(self, value: Any, found: list[str]) -> Any:
        if type(value) is dict:
            return {key: self._changed(item, found) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._changed(item, found) for item in value)
        kind = image_kind(value) if type(value) is bytes else ""
        if not kind:
            return value
        found.append(kind)
        with opened_picture(value, f"the {kind}", purpose="making pictures smaller") as picture:
            return self._written(picture, value, kind)

    def _written(self, picture: Any, data: bytes, kind: str) -> bytes:
        encoding = self.encoding or _OF_KIND.get(kind, "png")
        size = self._target(picture.size)
        if size == picture.size and encoding == _OF_KIND.get(kind):
            picture.load()  # the bytes are kept, but a broken picture is found
            return data
        orientation = picture.getexif().get(_ORIENTATION, 1)
        picture.draft(None, (2 * size[0], 2 * size[1]))  # a JPEG is decoded at a half or less where that is enough
        picture = _in_mode(picture, encoding)
        if picture.size != size:
            from PIL.Image import Resampling

            picture = picture.resize(size, Resampling.HAMMING)  # averages like a box, without its steps
        options: dict[str, Any] = {"quality": self.quality} if encoding == "jpeg" else {}
        if orientation != 1:
            from PIL.Image import Exif

            options["exif"] = Exif()
            options["exif"][_ORIENTATION] = orientation
        file = io.BytesIO()
        picture.save(file, encoding, **options)
        return file.getvalue()

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        shorter = min(size)
        if self.size is None or shorter <= self.size:
            return size
        width, height = (max(round(side * self.size / shorter), 1) for side in size)
        return width, height


def _in_mode(picture: Any, encoding: str) -> Any:
    """The picture in a mode that can be resized and that the encoding has."""
    if picture.mode in ("L", "RGB") or (encoding == "png" and picture.mode in ("LA", "RGBA", "I;16")):
        return picture
    if picture.mode == "1":
        return picture.convert("L")
    if encoding == "png" and (picture.mode in ("PA", "RGBa", "La") or "transparency" in picture.info):
        return picture.convert("RGBA")
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        raise ValueError(f"{picture.mode} pixels have more than 8 bits; --encode png keeps 16 of them in mode I;16")
    return picture.convert("RGB")
