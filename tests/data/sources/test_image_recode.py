"""Pictures made smaller: sizes, what stays, and what the pixels are."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lightning_speedkit.data.sources.image_recode import ImageRecode
from lightning_speedkit.errors import SourceError
from tests.data.sources.pictures import encoded, picture


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("size", "expected"), [((80, 60), (40, 30)), ((60, 80), (30, 40)), ((301, 30), (301, 30))])
def test_the_shorter_side_gets_the_size_and_nothing_grows(size: tuple[int, int], expected: tuple[int, int]) -> None:
    data = encoded(picture(0, size))
    small, label = ImageRecode(size=30)((data, 7))
    assert (opened(small).size, opened(small).format, label) == (expected, "JPEG", 7)
    assert (small == data) is (size == expected)


def test_the_pixels_are_those_of_the_picture() -> None:
    original = picture(4, (96, 64))
    reference = np.asarray(original.resize((48, 32), Image.Resampling.BOX), np.int16)
    for kind, bound in (("PNG", 3.0), ("JPEG", 5.0)):
        small = ImageRecode(size=32)(encoded(original, kind))
        assert opened(small).format == kind
        assert np.abs(np.asarray(opened(small), np.int16) - reference).mean() < bound


@pytest.mark.parametrize("kind", ["BMP", "GIF", "TIFF", "PPM", "WebP", "PNG"])
def test_other_kinds_become_png_without_loss_at_full_size(kind: str) -> None:
    image = picture(1, mode="L" if kind == "GIF" else "RGB")
    data = encoded(image, kind)
    result = ImageRecode()(data)
    assert opened(result).format == "PNG"
    assert np.array_equal(np.asarray(opened(result).convert("RGB")), np.asarray(opened(data).convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("encoding", ["jpeg", "png"])
def test_every_mode_is_written(mode: str, encoding: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    result = ImageRecode(size=5, encoding=encoding)(encoded(picture(2, mode=mode), kind))
    assert (opened(result).format, min(opened(result).size)) == (encoding.upper(), 5)
    if encoding == "png":
        assert opened(result).mode == {"1": "L", "P": "RGB", "CMYK": "RGB"}.get(mode, mode)


def test_the_orientation_is_kept_as_a_tag() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    picture(0, (80, 60)).save(file, "JPEG", exif=exif)
    small = opened(ImageRecode(size=30)(file.getvalue()))
    assert (small.size, small.getexif()[0x0112]) == ((40, 30), 6)


def test_all_pictures_of_a_nested_sample_and_nothing_else() -> None:
    data = encoded(picture(0, (80, 60)))
    sample = {"a": [data, "text"], "b": (b"BMW", data), "n": None}
    result = ImageRecode(size=10)(sample)
    assert (result["a"][1], result["b"][0], result["n"]) == ("text", b"BMW", None)
    assert [min(opened(x).size) for x in (result["a"][0], result["b"][1])] == [10, 10]
    assert sample["a"][0] is data


def test_quality_decides_the_bytes() -> None:
    data = encoded(Image.effect_noise((200, 200), 60), "PNG")
    small, large = (ImageRecode(encoding="jpeg", quality=q)(data) for q in (20, 90))
    assert len(small) < len(large) / 2


def test_broken_pictures_and_samples_without_one_are_errors() -> None:
    data = encoded(picture(0, (80, 60)))
    for recode in (ImageRecode(size=10), ImageRecode(size=1000)):
        with pytest.raises(SourceError, match="JPEG picture cannot be decoded"):
            recode((data[: len(data) // 2], 1))
    with pytest.raises(SourceError, match="no picture"):
        ImageRecode(size=10)((b"no picture", 1))


@pytest.mark.parametrize(
    "arguments", [{"size": 0}, {"size": True}, {"size": 1.5}, {"encoding": "gif"}, {"quality": 96}, {"quality": 0}]
)
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ImageRecode(**arguments)  # type: ignore[arg-type]
