"""Whole and broken pictures of every kind."""

from __future__ import annotations

import io
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from lightning_speedkit.data.sources.image_check import check_image, image_kind, opened_picture
from lightning_speedkit.errors import SourceError
from tests.data.sources.pictures import encoded, picture

KINDS = ("JPEG", "PNG", "WebP")


@pytest.mark.parametrize("kind", [*KINDS, "GIF", "BMP", "TIFF", "PPM"])
def test_the_kind_is_that_which_pillow_wrote(kind: str) -> None:
    data = encoded(picture(0), kind)
    assert image_kind(data) == {"PPM": "PNM"}.get(kind, kind)
    assert image_kind(data[:1]) == ""


def test_text_is_no_picture() -> None:
    assert [image_kind(text) for text in (b"", b"BMW and others, a list of cars", b"RIFF....WAVE", b"P7x")] == [""] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", ["quick", "full"])
def test_whole_pictures_pass_and_every_cut_is_found(kind: str, check: str) -> None:
    data = encoded(picture(1, (40, 30)), kind)
    check_image(data, "a", check)
    check_image(data + b"trailing bytes", "a", check)
    for size in (0, 1, 5, 20, len(data) // 2, len(data) - 20, len(data) - 1):
        with pytest.raises(SourceError, match=r"^folder/a: "):
            check_image(data[:size], "folder/a", check)
        check_image(data[:size], "folder/a", "none")


def test_the_end_of_a_thumbnail_is_not_the_end_of_the_picture() -> None:
    thumbnail = encoded(picture(2))
    data = encoded(picture(1, (40, 30)))
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    with_thumbnail = data[:2] + segment + data[2:]
    check_image(with_thumbnail, "a", "full")
    with pytest.raises(SourceError, match=r"^a: A truncated JPEG of 30 x 40 pixels"):
        check_image(with_thumbnail[:-200], "a", "quick")


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_progressive_grey_and_cmyk_jpeg_pass(mode: str) -> None:
    file = io.BytesIO()
    picture(3, (64, 64), mode).save(file, "JPEG", progressive=True, restart_marker_rows=1)
    check_image(file.getvalue(), "a", "quick")


def test_damage_in_the_middle_is_found_by_a_full_check_of_png() -> None:
    data = bytearray(encoded(Image.effect_noise((64, 64), 80), "PNG"))
    data[len(data) // 2] ^= 0xFF
    check_image(bytes(data), "a", "quick")
    with pytest.raises(SourceError, match="cannot be decoded"):
        check_image(bytes(data), "a", "full")


def test_a_changed_byte_of_a_png_is_found_wherever_it_is() -> None:
    """Of a smooth picture most damaged files can be decoded, to wrong pixels."""
    data = encoded(Image.linear_gradient("L").resize((40, 30)).convert("RGB"), "PNG")
    for place in range(8, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with pytest.raises(SourceError, match=r"^a: "):
            check_image(bytes(damaged), "a", "full")
        if place >= 33:  # behind the size
            with (
                pytest.raises(SourceError, match=r"^the PNG picture cannot be decoded \("),
                opened_picture(bytes(damaged), "the PNG", purpose="a test"),
            ):
                pass


def test_other_kinds_are_named_with_the_way_out() -> None:
    with pytest.raises(SourceError, match="a BMP; JPEG, PNG and WebP are stored as they are, --encode"):
        check_image(encoded(picture(0), "BMP"), "a", "quick")
    with pytest.raises(SourceError, match=r"begins with b'<html>"):
        check_image(b"<html>404", "a", "quick")


def test_what_no_image_field_reads_is_refused_unless_nothing_is_checked() -> None:
    file = io.BytesIO()
    picture(0).save(file, "WebP", save_all=True, append_images=[picture(1)])
    with pytest.raises(SourceError, match=r"^a: An animated WebP, which is not read"):
        check_image(file.getvalue(), "a", "quick")
    check_image(file.getvalue(), "a", "none")


def test_threads_leave_the_filters_of_warnings_as_they_were() -> None:
    data = encoded(picture(0))
    before = list(warnings.filters)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: check_image(data, "a", "full"), range(400)))
        assert list(warnings.filters) == before
    finally:
        sys.setswitchinterval(interval)
        warnings.filters[:] = before  # type: ignore[index]


@pytest.mark.parametrize("check", ["quick", "full"])
def test_a_warning_of_pillow_is_not_told(check: str) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 10000)).save(file, "PNG")  # from 89,478,486 pixels on Pillow warns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SourceError, match="more than the 89478485 pixels"):
            check_image(file.getvalue(), "a", check)
        with opened_picture(file.getvalue(), "the PNG", purpose="a test") as image:
            assert image.size == (9000, 10000)
