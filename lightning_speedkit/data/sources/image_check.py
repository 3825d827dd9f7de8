"""Finds broken pictures while they are packed, and not in the middle of a training run.

``quick`` looks at the first and last bytes, as an image field of a loader does before it decodes: a file that is empty,
of another kind or cut short is found, and so is a picture that no image field reads, such as an animated one. ``full``
also decodes the picture with Pillow, so damage in the middle is found as far as the format shows it. ``none`` looks at
nothing.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_speedkit.data.images.image_header import read_image_header
from lightning_speedkit.data.images.png_checksums import check_png
from lightning_speedkit.errors import ImageError, MissingExtraError, SourceError

__all__ = ["CHECKS", "check_image", "image_kind", "opened_picture"]

CHECKS = ("quick", "full", "none")
_STORABLE = ("JPEG", "PNG", "WebP")


def image_kind(data: bytes) -> str:
    """``"JPEG"``, ``"PNG"``, ``"WebP"``, ``"GIF"``, ``"BMP"``, ``"TIFF"`` or ``"PNM"`` by the first bytes, else ``""``.

    >>> image_kind(b"GIF89a"), image_kind(b"BMW")
    ('GIF', '')
    """
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:2] == b"BM" and len(data) >= 26 and int.from_bytes(data[2:6], "little") == len(data):
        return "BMP"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "TIFF"
    if data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace():
        return "PNM"
    return ""


def check_image(data: bytes, place: str, check: str) -> None:
    """Raise :class:`SourceError` if this is not a whole JPEG, PNG or WebP picture, as far as ``check`` looks."""
    if check == "none":
        return
    kind = image_kind(data)
    if kind not in _STORABLE:
        raise SourceError(f"{place}: {_why_not(data, kind)}")
    try:
        read_image_header(memoryview(data))
    except ImageError as error:
        raise SourceError(f"{place}: {error}") from error
    if check == "full":
        with opened_picture(data, f"{place}: the {kind}", purpose="check='full'") as picture:
            picture.load()


@contextmanager
def opened_picture(data: bytes, what: str, *, purpose: str) -> Iterator[Any]:
    """The picture in Pillow, whose warnings are left out.

    Args:
        data: the encoded picture.
        what: how an error calls it.
        purpose: what Pillow is needed for.

    Raises:
        SourceError: it cannot be opened, or the block raised one of Pillow's errors.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError(purpose, extra="pack", library="pillow") from None
    try:
        if image_kind(data) == "PNG":
            check_png(data)  # Pillow does not compare the checksums of the pixels
        with _no_warnings, Image.open(io.BytesIO(data)) as picture:
            yield picture
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SourceError(f"{what} picture cannot be decoded ({error}).") from error


def _why_not(data: bytes, kind: str) -> str:
    if not data:
        return "the file is empty (0 bytes)."
    if kind:
        return f"the picture is a {kind}; JPEG, PNG and WebP are stored as they are, --encode png or jpeg converts."
    return f"not a picture: it begins with {data[:8]!r}, which is none of JPEG, PNG and WebP."


class _NoWarnings:
    """No warnings while any thread is inside.

    The filters are those of the process: with ``catch_warnings`` in several threads at once, the last to leave may put
    back what another one has set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._held = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._held.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._held.close()


_no_warnings = _NoWarnings()
