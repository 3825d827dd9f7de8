"""Format and size of an encoded picture, read from its first bytes, and whether its end is there.

What it does: tells JPEG, PNG and WebP apart, reads the size without decoding, and refuses what no decoder should be
given: truncated data, another format, nothing at all, a picture with more pixels than :data:`MAX_PIXELS`.
When it helps: decoders differ in what they do with such data. Some return a half-grey picture, some raise, some reserve
gigabytes. Asked here first, the answer is one, and it says what is wrong.
What it costs: a few microseconds.

Source: ITU-T T.81 annex B (JPEG markers), the PNG specification (chunks), RFC 9649 (WebP container).
"""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from lightning_speedkit.errors import ImageError

__all__ = ["MAX_PIXELS", "ImageHeader", "read_image_header"]

MAX_PIXELS = (1 << 28) // 3
"""The largest picture that is decoded, in pixels: 89,478,485, which fill 256 MiB as RGB."""

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, extended, progressive; the last two with arithmetic coding
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF}  # lossless and hierarchical
_ALONE = {0x00, 0x01, *range(0xD0, 0xD8)}  # markers without a length
_JPEG_END = b"\xff\xd9"
_HEAD = 2048  # bytes, in which most files say their size
_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length
_FRAME = struct.Struct(">HBHHB")  # length, bits per sample, height, width, components
_READ = "ImageField reads JPEG, PNG and WebP"
_OTHERS = (
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x00\x00\x00\x0cjP", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<", "HTML or XML"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"PK\x03\x04", "a zip archive"),
)


class ImageHeader(NamedTuple):
    """What the first bytes say: format ("JPEG", "PNG" or "WebP"), size in pixels, and the components of a JPEG (1, 3 or
    4; 0 for the other formats)."""

    format: str
    height: int
    width: int
    components: int

    def __str__(self) -> str:
        return f"{self.format} of {self.height} x {self.width} pixels"


def read_image_header(data: memoryview) -> ImageHeader:
    """Format and size of an encoded picture.

    Args:
        data: all its bytes, as a one-dimensional memoryview of bytes.

    Raises:
        ImageError: no bytes, another format, truncated, animated, too many pixels, or a kind of JPEG that is not read
            (12 bits, lossless, hierarchical).

    >>> size = bytes([0, 0, 0, 13]) + b"IHDR" + bytes([0, 0, 0, 7, 0, 0, 0, 5, 8, 2, 0, 0, 0])
    >>> png = b"\\x89PNG\\r\\n\\x1a\\n" + size + bytes(4) + b"IEND" + bytes(4)
    >>> read_image_header(memoryview(png))
    ImageHeader(format='PNG', height=5, width=7, components=0)
    """
    head = bytes(data[:16])
    if head[:3] == _JPEG:
        header, complete = _jpeg(data)
    elif head[:8] == _PNG:
        header, complete = _png(data)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        header, complete = _webp(data)
    else:
        _refuse(head, len(data))
    if complete and 0 < header.height * header.width <= MAX_PIXELS:
        return header
    if not header.height or not header.width:
        raise ImageError(f"A {header} has no pixels: {_again(header.format)}")
    if header.height * header.width > MAX_PIXELS:
        raise ImageError(
            f"A {header} is more than the {MAX_PIXELS} pixels that are decoded. If it is what it should be, pack it "
            f"smaller or in tiles."
        )
    raise ImageError(f"A truncated {header}: its {len(data)} bytes lack the end. {_again(header.format)}")


def _again(format_: str) -> str:
    return f"Pack the {format_} again from a copy that opens, or leave it out."


def _refuse(head: bytes, size: int) -> NoReturn:
    if not size:
        raise ImageError("No bytes where a picture should be. Leave the sample out when packing.")
    seen = next((name for start, name in _OTHERS if head.startswith(start)), None)
    if head[4:8] == b"ftyp":
        seen = "AVIF or HEIF" if head[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1") else "a video"
    if seen is None:
        raise ImageError(
            f"No picture: {size} bytes that begin with {head[:8]!r}. {_READ}; encode the picture as one of these when "
            f"packing, or store it as an array without an ImageField."
        )
    raise ImageError(f"These {size} bytes look like {seen}. {_READ}; convert it to one of these when packing.")


def _jpeg(data: memoryview) -> tuple[ImageHeader, bool]:
    at, size = 2, len(data)
    head = bytes(data[:_HEAD])  # bytes are read faster than a memoryview
    while at + 10 <= size:
        if at + 10 > len(head):
            head = bytes(data)
        start, marker, length = _SEGMENT.unpack_from(head, at)
        if start != 0xFF or marker == 0xFF:
            at += 1  # fill bytes, and stray ones, which decoders skip too
        elif marker in _FRAMES:
            _, bits, height, width, components = _FRAME.unpack_from(head, at + 2)
            header = ImageHeader("JPEG", height, width, components)
            if bits != 8 or components not in (1, 3, 4):
                raise ImageError(
                    f"A {header} with {components} components of {bits} bits; read are 1, 3 or 4 of 8 bits. Encode it "
                    f"as an 8-bit JPEG or a PNG when packing."
                )
            return header, data[-2:] == _JPEG_END or _has(data, _JPEG_END, at, size)
        elif marker in _OTHER_FRAMES:
            raise ImageError(
                f"A lossless or hierarchical JPEG (marker 0xFF{marker:02X}), which is not read. Encode it as a "
                f"baseline JPEG or a PNG when packing."
            )
        elif marker in (0xD9, 0xDA):
            break  # the end, or the pixels, before the size
        else:
            at += 2 if marker in _ALONE else 2 + length
    raise ImageError(f"A JPEG of {size} bytes that does not say its size: truncated or damaged. {_again('JPEG')}")


def _png(data: memoryview) -> tuple[ImageHeader, bool]:
    if len(data) < 33 or bytes(data[12:16]) != b"IHDR":
        raise ImageError(
            f"A PNG of {len(data)} bytes that does not say its size: truncated or damaged. {_again('PNG')}"
        )
    width, height = struct.unpack_from(">II", data, 16)
    return ImageHeader("PNG", height, width, 0), _has(data, b"IEND", 33, len(data) - 4)


def _webp(data: memoryview) -> tuple[ImageHeader, bool]:
    if len(data) < 30:
        raise ImageError(f"A WebP of {len(data)} bytes that does not say its size: truncated. {_again('WebP')}")
    kind, (bits,) = bytes(data[12:16]), struct.unpack_from("<I", data, 21)
    if kind == b"VP8X":
        if data[20] & 0x02:
            raise ImageError("An animated WebP, which is not read. Store one frame, or the frames as samples.")
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L":
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (number & 0x3FFF for number in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError(f"A WebP whose first chunk is {kind!r}: damaged. {_again('WebP')}")
    (riff,) = struct.unpack_from("<I", data, 4)
    return ImageHeader("WebP", height, width, 0), len(data) >= riff + 8


def _has(data: memoryview, end: bytes, first: int, stop: int) -> bool:
    """Whether ``end`` is among these bytes: last, or earlier in files with something appended."""
    return data[max(first, stop - len(end)) : stop] == end or bytes(data[first:stop]).rfind(end) >= 0
