"""TFRecord files made by hand: the CRC bit by bit, the protobuf messages byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC, one bit at a time (RFC 3720, appendix B.4 has the vectors)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    bits = f"{crc32c(data):032b}"
    return (int(bits[-15:] + bits[:-15], 2) + 0xA282EAD8) % 2**32


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value > 127:
        out, value = out + bytes([value % 128 + 128]), value // 128
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def bytes_feature(*values: bytes) -> bytes:
    return field(1, b"".join(field(1, value) for value in values))


def float_feature(*values: float) -> bytes:
    return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))


def int_feature(*values: int) -> bytes:
    return field(3, field(1, b"".join(map(varint, values))))


def example(features: dict[str, bytes] | Sequence[tuple[str, bytes]]) -> bytes:
    pairs = features.items() if isinstance(features, dict) else features
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in pairs))
