"""What the first bytes of a picture say, compared with Pillow, and every kind of data that is none."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from lightning_speedkit.data.images.image_header import MAX_PIXELS, ImageHeader, read_image_header
from lightning_speedkit.errors import ImageError
from tests.data.pictures import encoded, photographs

CHINA = photographs()[0]
FILES = {
    "jpeg": encoded(CHINA, "JPEG"),
    "jpeg progressive": encoded(CHINA[:100, :31], "JPEG", progressive=True),
    "jpeg grey": encoded(CHINA[:7, :9, 0], "JPEG"),
    "jpeg cmyk": encoded(Image.fromarray(CHINA).convert("CMYK"), "JPEG"),
    "jpeg 1x1": encoded(CHINA[:1, :1], "JPEG"),
    "png": encoded(CHINA, "PNG"),
    "png grey": encoded(CHINA[:13, :5, 0], "PNG"),
    "png 1x1": encoded(CHINA[:1, :1], "PNG"),
    "webp": encoded(CHINA[:50, :77], "WEBP"),
    "webp lossless": encoded(CHINA[:51, :78], "WEBP", lossless=True),
    "webp extended": encoded(CHINA[:301, :401], "WEBP", exif=Image.Exif().tobytes() or b"Exif\0\0"),
    "webp 1x1": encoded(CHINA[:1, :1], "WEBP"),
}


def read(data: bytes) -> ImageHeader:
    return read_image_header(memoryview(data))


@pytest.mark.parametrize("name", FILES)
def test_what_pillow_says(name: str) -> None:
    header = read(FILES[name])
    with Image.open(io.BytesIO(FILES[name])) as image:
        assert (header.width, header.height) == image.size
        assert header.format.upper() == image.format
        if header.format == "JPEG":
            assert header.components == len(image.getbands())


def test_the_extended_form_of_webp_is_among_the_files() -> None:
    assert {bytes(FILES[name][12:16]) for name in FILES if "webp" in name} == {b"VP8 ", b"VP8L", b"VP8X"}


@pytest.mark.parametrize("name", FILES)
def test_every_part_of_a_file_is_called_truncated(name: str) -> None:
    data = FILES[name]
    for size in {*range(12, 60), *range(60, len(data), max(1, len(data) // 50)), len(data) - 2, len(data) - 1}:
        if size < len(data):
            with pytest.raises(ImageError, match="truncated"):
                read(data[:size])


@pytest.mark.parametrize("name", FILES)
def test_what_is_appended_to_a_file_does_no_harm(name: str) -> None:
    assert read(FILES[name] + b"\x00" * 777) == read(FILES[name])


def test_the_thumbnail_of_a_truncated_jpeg_is_not_its_end() -> None:
    thumbnail = encoded(CHINA[:20, :20], "JPEG")
    data = FILES["jpeg"]
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    whole = data[:2] + segment + data[2:]
    assert read(whole) == read(data)
    with pytest.raises(ImageError, match="truncated JPEG of 427 x 640"):
        read(whole[:-500])


def test_fill_bytes_and_stray_bytes_between_the_markers() -> None:
    data = FILES["jpeg"]
    assert read(data[:2] + b"\xff\xff\xff" + data[2:]) == read(data)
    assert read(data[:3] + data[3:20] + b"\x01\x02\x03" + data[20:]) == read(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "No bytes"),
        (b"\x00" * 40, "No picture: 40 bytes"),
        (b"hello", "No picture: 5 bytes that begin with b'hello'"),
        (b"GIF89a" + bytes(30), "GIF"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\x00" + bytes(60), "TIFF"),
        (b"MM\x00*" + bytes(60), "TIFF"),
        (b"\x00\x00\x00\x20ftypavif" + bytes(60), "AVIF"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(60), "HEIF"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(60), "video"),
        (b"\x00\x00\x00\x0cJXL \r\n" + bytes(60), "JPEG XL"),
        (b"\xff\x0a" + bytes(60), "JPEG XL"),
        (b"\x00\x00\x00\x0cjP  \r\n" + bytes(60), "JPEG 2000"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\x93NUMPY\x01\x00" + bytes(60), "NumPy"),
        (b"PK\x03\x04" + bytes(60), "zip"),
    ],
)
def test_other_data_is_named(data: bytes, said: str) -> None:
    with pytest.raises(ImageError, match=said) as caught:
        read(data)
    assert "packing" in str(caught.value)  # what to do


def png(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IEND"
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + body
        + struct.pack(">I", zlib.crc32(body))
        + struct.pack(">I", 0)
        + end
        + struct.pack(">I", zlib.crc32(end))
    )


def jpeg(height: int, width: int, *, marker: int = 0xC0, bits: int = 8, components: int = 3) -> bytes:
    frame = struct.pack(">HBHHB", 8 + 3 * components, bits, height, width, components) + bytes(3 * components)
    return b"\xff\xd8\xff" + bytes([marker]) + frame + b"\xff\xd9"


def test_the_largest_picture() -> None:
    assert MAX_PIXELS == 89_478_485
    assert read(png(5, MAX_PIXELS // 5)).height == MAX_PIXELS // 5
    assert read(jpeg(9459, 9459)).width == 9459
    for data in (png(5, MAX_PIXELS // 5 + 1), png(2**31 - 1, 2**31 - 1), jpeg(65500, 65500), jpeg(9460, 9460)):
        with pytest.raises(ImageError, match="89478485 pixels"):
            read(data)


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), jpeg(0, 5), jpeg(5, 0)])
def test_no_pixels(data: bytes) -> None:
    with pytest.raises(ImageError, match="no pixels"):
        read(data)


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC2, 0xC9, 0xCA])
def test_the_frames_that_are_read(marker: int) -> None:
    assert read(jpeg(4, 5, marker=marker)) == ("JPEG", 4, 5, 3)


@pytest.mark.parametrize("marker", [0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF])
def test_the_frames_that_are_not(marker: int) -> None:
    with pytest.raises(ImageError, match=f"0xFF{marker:X}"):
        read(jpeg(4, 5, marker=marker))


@pytest.mark.parametrize(("bits", "components"), [(12, 3), (8, 2), (8, 5), (16, 1)])
def test_other_kinds_of_jpeg(bits: int, components: int) -> None:
    with pytest.raises(ImageError, match=f"{components} components of {bits} bits"):
        read(jpeg(4, 5, bits=bits, components=components))


def test_damaged_starts() -> None:
    for data in (
        b"\xff\xd8\xff\xda" + bytes(50),  # the pixels before the size
        b"\xff\xd8\xff\xd9" + bytes(50),
        b"\xff\xd8\xff\xe0\xff\xff" + bytes(50),  # a segment longer than the file
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        b"RIFF" + bytes(4) + b"WEBPXXXX" + bytes(50),
    ):
        with pytest.raises(ImageError, match="damaged"):
            read(data)


def test_an_animated_webp() -> None:
    frames = [Image.fromarray(photograph[:40, :50]) for photograph in photographs()]
    with pytest.raises(ImageError, match="animated"):
        read(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))


def test_no_bytes_make_anything_but_a_header_or_an_image_error() -> None:
    random = np.random.default_rng(0)
    for data in FILES.values():
        for _ in range(60):
            damaged = bytearray(data[:2000] if random.random() < 0.3 else data)
            for place in random.integers(0, min(len(damaged), 400), 8):
                damaged[place] = random.integers(256)
            with contextlib.suppress(ImageError):
                assert read(bytes(damaged)).height > 0
