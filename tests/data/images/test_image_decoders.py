"""Each decoder against the pixels that were encoded, against the others, and with what it cannot read."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_speedkit.data.images import image_decoders
from lightning_speedkit.data.images.image_decoders import DECODERS, check_decoder, decode_picture, decoder_for
from lightning_speedkit.data.images.image_header import read_image_header
from lightning_speedkit.errors import ImageError, MissingExtraError
from tests.data.pictures import Pixels, decoder_parameters, differences, encoded, installed_decoders, needs, photographs

CHINA = photographs()[0]
RGBA = np.dstack([CHINA, np.tile((np.arange(640) % 256).astype(np.uint8), (427, 1))])
DEEP = CHINA.astype(np.uint16) * 251 + 77  # 16 bits
PALETTE = Image.fromarray(CHINA).quantize(64)
ROTATED = Image.Exif()
ROTATED[0x112] = 6  # turned by a quarter


def decode(data: bytes, name: str = "auto", channels: int = 3, reduction: int = 1) -> Pixels:
    view = memoryview(data)
    return decode_picture(view, read_image_header(view), channels, reduction, name)


def luma(pixels: Pixels) -> np.ndarray:
    return (pixels.astype(np.float64) @ [0.299, 0.587, 0.114])[:, :, None]


def png16(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits, which Pillow cannot write in color."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV, which writes the file, is not installed")
    return bytes(cv2.imencode(".png", pixels[:, :, ::-1] if pixels.ndim == 3 else pixels)[1])


LOSSLESS: dict[str, tuple[Any, Pixels]] = {
    "rgb": (lambda: encoded(CHINA, "PNG"), CHINA),
    "odd size": (lambda: encoded(CHINA[:5, :3], "PNG"), CHINA[:5, :3]),
    "one pixel": (lambda: encoded(CHINA[:1, :1], "PNG"), CHINA[:1, :1]),
    "grey": (lambda: encoded(CHINA[:, :, 0], "PNG"), CHINA[:, :, [0, 0, 0]]),
    "alpha is dropped": (lambda: encoded(RGBA, "PNG"), CHINA),
    "grey with alpha": (
        lambda: encoded(Image.fromarray(CHINA[:, :, 1].copy()).convert("LA"), "PNG"),
        CHINA[:, :, [1] * 3],
    ),
    "palette": (lambda: encoded(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
    "transparent palette": (
        lambda: encoded(PALETTE, "PNG", transparency=bytes(range(64))),
        np.asarray(PALETTE.convert("RGB")),
    ),
    "one bit": (
        lambda: encoded(Image.fromarray(CHINA[:, :, 0] > 99), "PNG"),
        np.where(CHINA[:, :, [0, 0, 0]] > 99, 255, 0).astype(np.uint8),
    ),
    "16 bits": (lambda: png16(DEEP), (DEEP >> 8).astype(np.uint8)),
    "16 bits grey": (lambda: png16(DEEP[:, :, 2]), (DEEP[:, :, [2, 2, 2]] >> 8).astype(np.uint8)),
    "an orientation is not applied": (lambda: encoded(CHINA, "PNG", exif=ROTATED), CHINA),
    "webp": (lambda: encoded(CHINA[:200, :300], "WEBP", lossless=True), CHINA[:200, :300]),
    "webp with alpha": (lambda: encoded(RGBA[:200, :300], "WEBP", lossless=True, exact=True), CHINA[:200, :300]),
    "webp with an orientation": (
        lambda: encoded(CHINA[:200, :300], "WEBP", lossless=True, exif=ROTATED),
        CHINA[:200, :300],
    ),
}


@functools.cache
def lossless(kind: str) -> tuple[bytes, Pixels]:
    make, expected = LOSSLESS[kind]
    return make(), expected


@pytest.mark.parametrize("name", decoder_parameters("WebP"))
@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_pictures_come_back_as_they_were(kind: str, name: str) -> None:
    if "webp" not in kind and "PNG" not in DECODERS[name].formats:
        pytest.skip(f"{name} is not used for PNG")
    data, expected = lossless(kind)
    assert np.array_equal(decode(data, name), expected)
    grey = decode(data, name, channels=1)
    assert grey.shape == (*expected.shape[:2], 1)
    assert np.abs(grey - luma(expected)).max() <= 1.01


JPEGS: dict[str, bytes] = {
    "4:4:4": encoded(CHINA, "JPEG", quality=92, subsampling=0),
    "4:2:2": encoded(CHINA, "JPEG", quality=92, subsampling=1),
    "4:2:0": encoded(CHINA, "JPEG", quality=92, subsampling=2),
    "progressive": encoded(CHINA, "JPEG", quality=92, progressive=True),
    "odd size": encoded(CHINA[:333, :517], "JPEG", quality=92),
    "one pixel": encoded(CHINA[:1, :1], "JPEG", quality=92),
    "restart markers": encoded(CHINA, "JPEG", quality=92, restart_marker_blocks=3),
    "orientation": encoded(CHINA, "JPEG", quality=92, exif=ROTATED),
    "rgb components": encoded(CHINA, "JPEG", quality=92, keep_rgb=True),
    "appended": encoded(CHINA, "JPEG", quality=92) + b"more" * 99,
}


@pytest.mark.parametrize("name", decoder_parameters("JPEG"))
@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_is_close_to_what_was_encoded(kind: str, name: str) -> None:
    pixels = decode(JPEGS[kind], name)
    source = CHINA[: pixels.shape[0], : pixels.shape[1]]
    assert pixels.shape == source.shape
    assert differences(pixels, source)[0] < 4
    grey = decode(JPEGS[kind], name, channels=1)
    assert np.abs(grey - luma(source)).mean() < 3


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", JPEGS)
def test_all_decoders_give_the_same_pixels_of_a_jpeg(kind: str, channels: int) -> None:
    first, *others = (decode(JPEGS[kind], name, channels) for name in installed_decoders("JPEG"))
    for other in others:
        mean, largest = differences(first, other)
        assert mean <= 0.1  # 0 where all are built on one libjpeg-turbo
        assert largest <= 2


@pytest.mark.parametrize("name", decoder_parameters("JPEG"))
def test_grey_and_cmyk_jpegs(name: str) -> None:
    grey = decode(encoded(CHINA[:, :, 1], "JPEG", quality=95), name)
    assert differences(grey, CHINA[:, :, [1, 1, 1]])[0] < 3
    cmyk = encoded(Image.fromarray(CHINA).convert("CMYK"), "JPEG", quality=95, subsampling=0)
    without_marker = cmyk[:2] + cmyk[2 + 2 + 14 :]  # not from Adobe: that it is inverted goes unsaid
    assert b"Adobe" in cmyk[:20]
    assert b"Adobe" not in without_marker
    for data in (cmyk, without_marker):
        assert differences(decode(data, name), CHINA)[0] < 4
        assert np.abs(decode(data, name, channels=1) - luma(CHINA)).mean() < 3


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("name", decoder_parameters("JPEG"))
def test_a_reduced_jpeg_is_the_mean_of_squares(name: str, reduction: int) -> None:
    for size in ((427, 640), (422, 637), (64, 64), (71, 127)):
        for options in ({"subsampling": 0}, {"subsampling": 2}, {"progressive": True}):
            data = encoded(CHINA[: size[0], : size[1]], "JPEG", quality=90, **options)
            for channels in (1, 3):
                reduced = decode(data, name, channels, reduction)
                assert reduced.shape == (-(-size[0] // reduction), -(-size[1] // reduction), channels)
                rows, columns = size[0] // reduction, size[1] // reduction
                whole = decode(data, name, channels)[: rows * reduction, : columns * reduction].astype(np.float64)
                mean = whole.reshape(rows, reduction, columns, reduction, channels).mean((1, 3))
                apart = np.abs(reduced[:rows, :columns] - mean)
                assert apart.mean() < 1.2
                assert apart.max() < 40


def test_reducing_needs_the_right_scale_of_the_smallest_pictures_too() -> None:
    for name in installed_decoders("JPEG"):
        for reduction in (2, 4, 8):
            for side in range(8 * reduction, 9 * reduction):
                data = encoded(CHINA[:side, : side + 1], "JPEG")
                assert decode(data, name, 3, reduction).shape[0] == -(-side // reduction)


def without_rgb_flag() -> types.SimpleNamespace:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    names = [n for n in dir(cv2) if n.startswith("IMREAD_") and n != "IMREAD_COLOR_RGB"]
    functions = ("imdecode", "cvtColor", "COLOR_BGR2RGB")
    return types.SimpleNamespace(**{n: getattr(cv2, n) for n in (*names, *functions)})


def test_an_opencv_that_only_knows_bgr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", without_rgb_flag())
    old = DECODERS["opencv"].load()
    monkeypatch.undo()
    for reduction in (1, 2, 4, 8):
        view = memoryview(JPEGS["4:2:0"])
        pixels = old(view, read_image_header(view), 3, reduction)
        assert np.array_equal(pixels, decode(JPEGS["4:2:0"], "opencv", 3, reduction))


@pytest.mark.parametrize("name", decoder_parameters("JPEG"))
def test_damage_is_an_image_error_or_a_picture_of_the_right_shape(name: str) -> None:
    random = np.random.default_rng(3)
    files = [encoded(CHINA[:90, :120], format_.upper()) for format_ in DECODERS[name].formats]
    refused = 0
    for data in files:
        for _ in range(40):
            damaged = bytearray(data)
            for place in random.integers(4, len(data), 12):
                damaged[place] = random.integers(256)
            try:
                assert decode(bytes(damaged), name).shape[2] == 3
            except ImageError:
                refused += 1
    assert refused > 5


@pytest.mark.parametrize("name", ["auto", *decoder_parameters("PNG")])
def test_a_changed_byte_of_a_png_is_an_image_error(name: str) -> None:
    """Everywhere, but in the checksum of the end, which some do not look at; it says nothing of the pixels."""
    smooth = np.add.outer(np.arange(37), np.arange(53)).astype(np.uint8)[:, :, None].repeat(3, 2)  # compresses well
    for pixels in (smooth, CHINA[:20, :30]):
        data = encoded(pixels, "PNG")
        assert np.array_equal(decode(data, name), pixels)
        for place in range(8, len(data) - 4, 5):
            damaged = bytearray(data)
            damaged[place] ^= 0xFF
            with pytest.raises(ImageError):
                decode(bytes(damaged), name)


@pytest.mark.parametrize("name", decoder_parameters("JPEG"))
def test_what_a_library_says_is_passed_on(name: str) -> None:
    data = bytearray(JPEGS["4:2:0"])
    start = data.find(b"\xff\xc4")  # the Huffman tables
    data[start + 4 : start + 30] = b"\xff" * 26
    with pytest.raises(
        ImageError, match=f"{DECODERS[name].distribution} cannot decode this JPEG of 427 x 640"
    ) as caught:
        decode(bytes(data), name)
    assert caught.value.__cause__ is not None


def test_another_size_than_the_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (decoder, _), data = decoder_for("PNG", "pillow"), encoded(CHINA, "PNG")
    wrong = (decoder, lambda *_: np.zeros((5, 7), np.uint8))
    monkeypatch.setitem(image_decoders._LOADED, ("PNG", "pillow"), wrong)
    with pytest.raises(ImageError, match="PNG of 427 x 640 pixels in which pillow found 5 x 7 x 1"):
        decode(data, "pillow")


def test_memory_that_runs_out_is_no_fault_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(image_decoders._LOADED, ("PNG", "auto"), (DECODERS["pillow"], full))
    with pytest.raises(MemoryError):
        decode(encoded(CHINA, "PNG"))


@needs("simplejpeg")
def test_auto_goes_on_where_the_fastest_cannot() -> None:
    plain = JPEGS["4:4:4"]
    odd_subsampling = encoded(Image.fromarray(CHINA).convert("CMYK"), "JPEG", quality=95, subsampling=2)
    stray_bytes = plain[:20] + b"\x01\x02" + plain[20:]
    for data, apart in ((odd_subsampling, 10), (stray_bytes, 4)):
        with pytest.raises(ImageError, match="simplejpeg cannot decode"):
            decode(data, "simplejpeg")
        assert differences(decode(data), CHINA)[0] < apart
    assert decoder_for("JPEG")[0].distribution == "simplejpeg"  # still


def test_a_picture_that_no_library_reads_has_the_error_of_the_fastest() -> None:
    data = JPEGS["4:2:0"]
    start = data.find(b"\xff\xc4")
    fastest = DECODERS[installed_decoders("JPEG")[0]].distribution
    with pytest.raises(ImageError, match=f"{fastest} cannot decode"):
        decode(data[: start + 4] + b"\xff" * 26 + data[start + 30 :])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("simplejpeg", "reads JPEG, and this is a PNG", marks=needs("simplejpeg")),
        pytest.param("torchvision", "reads JPEG and WebP, and this is a PNG", marks=needs("torchvision")),
    ],
)
def test_a_format_that_the_decoder_does_not_read(name: str, said: str) -> None:
    with pytest.raises(ImageError, match=rf"decoder='{name}' {said}\. Use decoder='auto'"):
        decode(encoded(CHINA, "PNG"), name)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing loaded yet."""
    monkeypatch.setattr(image_decoders, "_LOADED", {})
    return monkeypatch


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))


def test_the_order_by_speed(fresh: pytest.MonkeyPatch) -> None:
    assert list(DECODERS) == ["simplejpeg", "opencv", "torchvision", "pillow"]
    without(fresh, "torchvision")
    for installed, jpeg, png in (
        (("simplejpeg", "cv2", "PIL"), "simplejpeg", "opencv-python-headless"),
        (("simplejpeg", "PIL"), "simplejpeg", "pillow"),
        (("cv2", "PIL"), "opencv-python-headless", "opencv-python-headless"),
        (("PIL",), "pillow", "pillow"),
    ):
        if all(importlib.util.find_spec(module) for module in installed):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(image_decoders, "_LOADED", {})
                without(patch, *({"simplejpeg", "cv2", "torchvision", "PIL"} - set(installed)))
                assert decoder_for("JPEG")[0].distribution == jpeg
                assert decoder_for("PNG")[0].distribution == png
                assert decoder_for("WebP")[0].distribution == png


def test_what_is_missing_is_named(fresh: pytest.MonkeyPatch) -> None:
    without(fresh, "simplejpeg", "cv2", "torchvision", "PIL")
    for name, extra in (
        ("simplejpeg", "images"),
        ("opencv", "images"),
        ("pillow", "images"),
        ("torchvision", "vision"),
    ):
        with pytest.raises(MissingExtraError, match=rf"decoder='{name}' needs .*\[{extra}\]"):
            check_decoder(name)
        with pytest.raises(MissingExtraError):
            decoder_for("JPEG", name)
    with pytest.raises(MissingExtraError, match="Decoding pictures needs simplejpeg, OpenCV or Pillow"):
        check_decoder("auto")
    with pytest.raises(MissingExtraError, match="Decoding a PNG needs OpenCV or Pillow"):
        decoder_for("PNG")


def test_a_library_that_does_not_import_is_passed_over(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    first = installed_decoders("PNG")[0]
    fresh.setitem(DECODERS, first, DECODERS[first]._replace(load=broken))
    with caplog.at_level(logging.INFO, image_decoders.__name__):
        assert decoder_for("PNG")[0] is not DECODERS[first]
    assert f"{DECODERS[first].distribution} is passed over" in caplog.text
    assert "torchvision::nms" in caplog.text
    with pytest.raises(RuntimeError, match="nms"):  # asked for by name, its own error says it best
        decoder_for("PNG", first)


def test_the_choice_is_told_once(fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, image_decoders.__name__):
        for _ in range(3):
            decode(JPEGS["4:2:0"])
            decode(encoded(CHINA[:9, :9], "PNG"))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith(f"JPEG pictures are decoded by {DECODERS[installed_decoders('JPEG')[0]].distribution} ")
    assert told[1].startswith("PNG pictures are decoded by ")
    assert any(character.isdigit() for character in told[0])  # its version


def test_nothing_is_imported_before_the_first_picture() -> None:
    source = importlib.util.find_spec("lightning_speedkit.data.images.image_decoders")
    assert source is not None
    module = importlib.util.module_from_spec(source)
    assert source.loader is not None
    before = set(sys.modules)
    source.loader.exec_module(module)
    assert not {"simplejpeg", "cv2", "torchvision", "PIL"} & (set(sys.modules) - before)
    assert module._LOADED == {}
