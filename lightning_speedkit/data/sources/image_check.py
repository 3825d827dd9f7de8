"""Finds broken pictures while they are packed, and not in the middle of a training run.

``quick`` looks at the first and last bytes: a file that is empty, of another kind, or was cut short is found, at no
cost to speak of. ``full`` decodes the picture with Pillow, so damage in the middle is found too as far as the format
shows it. ``none`` looks at nothing.
"""

from __future__ import annotations

import io
import warnings

from lightning_speedkit.errors import MissingExtraError, SourceError

__all__ = ["CHECKS", "check_image", "image_kind"]

CHECKS = ("quick", "full", "none")
_JPEG_END = b"\xff\xd9"
_PNG_END = b"IEND\xaeB`\x82"
_BARE_MARKERS = (0x01, *range(0xD0, 0xD9))  # markers without a length
_START_OF_SCAN = 0xDA
STORABLE = ("JPEG", "PNG", "WebP")


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
    if kind not in STORABLE:
        raise SourceError(f"{place}: {_why_not(data, kind)}")
    if not _ends(data, kind):
        raise SourceError(f"{place}: the {kind} picture of {len(data)} bytes has no end: the file was cut short.")
    if check == "full":
        _decode(data, place, kind)


def _why_not(data: bytes, kind: str) -> str:
    if not data:
        return "the file is empty (0 bytes)."
    if kind:
        return f"the picture is a {kind}; JPEG, PNG and WebP are stored as they are, --encode png or jpeg converts."
    return f"not a picture: it begins with {data[:8]!r}, which is none of JPEG, PNG and WebP."


def _ends(data: bytes, kind: str) -> bool:
    if kind == "PNG":
        return _PNG_END in data[-(1 << 16) :]
    if kind == "WebP":
        return int.from_bytes(data[4:8], "little") + 8 <= len(data)
    scan = _start_of_scan(data)
    return scan > 0 and data.rfind(_JPEG_END, scan) > 0


def _start_of_scan(data: bytes) -> int:
    """Where the compressed data of a JPEG begins. A thumbnail before it has an end mark of its own."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == _START_OF_SCAN:
            return position
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _BARE_MARKERS:
            position += 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return 0


def _decode(data: bytes, place: str, kind: str) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("check='full'", extra="pack", library="pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as picture:
                picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SourceError(f"{place}: the {kind} picture cannot be decoded ({error}).") from error
