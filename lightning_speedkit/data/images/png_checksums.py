"""The checksums of a PNG, compared before a library decodes it that leaves out those of the pixels.

What it does: walks over the chunks and compares the CRC-32 of each one.
When it helps: Pillow (12) compares none of the pixel data, and gives wrong pixels for most files with one changed byte.
libpng, and so OpenCV, compares them while it decodes.
What it costs: one CRC-32 over the file, a small part of the decoding.

Source: Portable Network Graphics (PNG) Specification, third edition, section 5.3 (chunk layout).
"""

from __future__ import annotations

import struct
import zlib

__all__ = ["check_png"]

_FIRST = 8  # bytes of the signature
_HEAD = struct.Struct(">I4s")  # length of the data, kind
_CRC = struct.Struct(">I")


def check_png(data: bytes | memoryview) -> None:
    """Raise :class:`ValueError` unless every chunk up to the last one, ``IEND``, has the CRC-32 that it says.

    What follows ``IEND`` is not looked at.

    >>> check_png(b"\\x89PNG\\r\\n\\x1a\\n" + bytes(4) + b"IEND" + bytes(4))
    Traceback (most recent call last):
        ...
    ValueError: the checksum of its chunk b'IEND' at byte 8 does not match
    """
    view, at = memoryview(data), _FIRST
    while at + _HEAD.size + _CRC.size <= len(view):
        length, kind = _HEAD.unpack_from(view, at)
        end = at + _HEAD.size + length
        if end + _CRC.size > len(view):
            break
        if zlib.crc32(view[at + 4 : end]) != _CRC.unpack_from(view, end)[0]:
            raise ValueError(f"the checksum of its chunk {kind!r} at byte {at} does not match")
        if kind == b"IEND":
            return
        at = end + _CRC.size
    raise ValueError(f"its chunk at byte {at} goes beyond the end")
