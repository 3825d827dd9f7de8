"""The field against Pillow's own resizing, across decoders, and in how it is written down."""

from __future__ import annotations

import copy
import pickle
import random as python_random
import threading
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_speedkit.data.images import image_decoders
from lightning_speedkit.data.images.image_field import ImageField
from lightning_speedkit.data.images.image_geometry import Box, center_box, random_box
from lightning_speedkit.data.images.image_header import read_image_header
from lightning_speedkit.errors import ImageError, MissingExtraError
from tests.data.pictures import Pixels, decoder_parameters, differences, encoded, installed_decoders, photographs

CROPS = ("resize", "center", "random")


def by_pillow(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    part = Image.fromarray(pixels[box.top : box.top + box.height, box.left : box.left + box.width])
    return np.asarray(part.resize(size[::-1], Image.Resampling.BILINEAR))


def pixels_of(field: ImageField, data: bytes, seed: int = 5) -> Pixels:
    return field(data, np.random.default_rng(seed)).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("size", [(224, 224), (96, 200), (300, 40), (640, 640), (1, 1), (3, 1)])
def test_what_pillow_makes_of_the_part(size: tuple[int, int], crop: str) -> None:
    for number, pixels in enumerate(photographs()):
        field = ImageField(size, crop=crop)
        box = {
            "resize": Box(0, 0, 427, 640),
            "center": center_box(427, 640, size),
            "random": random_box(427, 640, (0.08, 1.0), (3 / 4, 4 / 3), np.random.default_rng(number)),
        }[crop]
        found = pixels_of(field, encoded(pixels, "PNG"), number)
        assert differences(found, by_pillow(pixels, box, size))[1] <= 1


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("side", [8, 25, 50, 100])  # reduced by 8, 8, 4 and 2 as a whole
def test_the_crop_of_a_reduced_jpeg_is_in_the_right_place(side: int, crop: str) -> None:
    # a ramp from 0 to 255 along each side: the value says where a pixel comes from
    down, right = np.meshgrid(np.linspace(0, 255, 427), np.linspace(0, 255, 643), indexing="ij")
    ramp = np.dstack([down, right, np.full_like(down, 128)]).round().astype(np.uint8)
    jpeg, png = encoded(ramp, "JPEG", quality=100, subsampling=0), encoded(ramp, "PNG")
    for seed in range(12):
        field = ImageField(side, crop=crop)
        reduced, whole = (pixels_of(field, data, seed).astype(int) for data in (jpeg, png))
        steps = [abs(whole[-1, 0, 0] - whole[0, 0, 0]) / (side - 1), abs(whole[0, -1, 1] - whole[0, 0, 1]) / (side - 1)]
        assert np.abs(reduced - whole)[:, :, 0].max() <= 2 + steps[0]  # within one pixel of the target
        assert np.abs(reduced - whole)[:, :, 1].max() <= 2 + steps[1]


def test_a_jpeg_is_reduced_from_twice_the_target_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    decode = image_decoders.decode_picture
    monkeypatch.setattr(
        "lightning_speedkit.data.images.image_field.decode_picture",
        lambda data, header, channels, reduction, name: (
            asked.append(reduction) or decode(data, header, channels, reduction, name)
        ),
    )
    china = photographs()[0]
    for side in (214, 213, 107, 106, 53, 7):
        ImageField(side)(encoded(china, "JPEG"))
    assert asked == [1, 2, 2, 4, 8, 1]
    asked.clear()
    ImageField(53)(encoded(china, "PNG"))
    ImageField(53)(encoded(china, "WEBP"))
    ImageField(53)(encoded(Image.fromarray(china).convert("CMYK"), "JPEG"))
    ImageField((53, 400))(encoded(china, "JPEG"))
    ImageField(213, crop="center")(encoded(china, "JPEG"))
    ImageField(213, crop="random", scale=(0.1, 0.2))(encoded(china, "JPEG"), np.random.default_rng(0))
    assert asked == [1, 1, 1, 1, 2, 1]


FILES: dict[str, bytes] = {}
for _number, _pixels in enumerate(photographs()):
    FILES[f"jpeg {_number}"] = encoded(_pixels, "JPEG", quality=90)
    FILES[f"jpeg 4:2:0 {_number}"] = encoded(_pixels[3:, 5:], "JPEG", quality=75, subsampling=2, progressive=True)
    FILES[f"png {_number}"] = encoded(_pixels, "PNG")
    FILES[f"webp {_number}"] = encoded(_pixels, "WEBP", quality=85)
for _name, _height, _width in (
    ("wide", 9, 640),
    ("tall", 427, 6),
    ("row", 1, 300),
    ("column", 300, 1),
    ("pixel", 1, 1),
):
    for _format in ("JPEG", "PNG", "WEBP"):
        FILES[f"{_name} {_format}"] = encoded(photographs()[1][-_height:, -_width:], _format)
FILES["cmyk"] = encoded(Image.fromarray(photographs()[0]).convert("CMYK"), "JPEG", subsampling=0)
FILES["grey"] = encoded(photographs()[0][:, :, 1], "JPEG")


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("name", FILES)
def test_decoders_agree_within_the_stated_tolerance(name: str, crop: str) -> None:
    data = FILES[name]
    format_ = read_image_header(memoryview(data)).format
    for size, channels in ((224, 3), (100, 3), (50, 1), ((37, 201), 3), (16, 3)):
        found = {
            decoder: pixels_of(ImageField(size, crop=crop, channels=channels, decoder=decoder), data)
            for decoder in installed_decoders(format_)
        }
        reference = found.pop(next(iter(found)))
        for decoder, pixels in found.items():
            mean, largest = differences(reference, pixels)
            # torchvision does not reduce a JPEG in its DCT
            assert mean <= 1.05
            assert largest <= (16 if decoder == "torchvision" and format_ == "JPEG" else 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", decoder_parameters("WebP"))
def test_into_a_row_of_a_batch(name: str, channels: int) -> None:
    field = ImageField((30, 50), channels=channels, decoder=name)
    batch = np.full((4, *field.shape), 77, np.uint8)
    for format_ in image_decoders.DECODERS[name].formats:
        data = encoded(photographs()[0], format_.upper())
        field.decode_into(data, batch[1])
        expected = field(data)
        assert torch.equal(torch.from_numpy(batch)[1].permute(2, 0, 1), expected)
        assert (batch[[0, 2, 3]] == 77).all()
        for other in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8).data):
            assert torch.equal(field(other), expected)


def test_what_a_call_returns() -> None:
    field = ImageField((30, 50))
    picture = field(FILES["jpeg 0"])
    assert field.shape == (30, 50, 3)
    assert (picture.shape, picture.dtype) == ((3, 30, 50), torch.uint8)
    assert picture[None].is_contiguous(memory_format=torch.channels_last)
    assert ImageField(8, channels=1)(FILES["jpeg 0"]).shape == (1, 8, 8)


def test_the_row_must_be_the_right_one() -> None:
    field = ImageField((30, 50))
    for out in (np.empty((50, 30, 3), np.uint8), np.empty((30, 50, 1), np.uint8), np.empty((30, 50, 3), np.float32)):
        with pytest.raises(ValueError, match=r"out must be uint8 of shape \(30, 50, 3\)"):
            field.decode_into(FILES["jpeg 0"], out)


def test_only_the_generator_decides() -> None:
    field, data = ImageField(32, crop="random"), FILES["jpeg 0"]
    assert field.random
    states = python_random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    first, again, other = (field(data, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert python_random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    with pytest.raises(ValueError, match="rng"):
        field(data)


@pytest.mark.parametrize("crop", ["resize", "center"])
def test_without_randomness_a_generator_is_left_alone(crop: str) -> None:
    rng = np.random.default_rng(0)
    field = ImageField(32, crop=crop)
    assert not field.random
    assert torch.equal(field(FILES["jpeg 0"], rng), field(FILES["jpeg 0"]))
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("name", decoder_parameters("WebP"))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_truncated_bytes_never_become_a_picture(format_: str, name: str) -> None:
    data = encoded(photographs()[0][:80, :90], format_)
    field = ImageField(16, decoder=name)
    for size in (0, 1, 12, 30, 100, len(data) // 2, len(data) - 100, len(data) - 1):
        with pytest.raises(ImageError):
            field(data[:size])


def test_what_is_no_buffer() -> None:
    with pytest.raises(TypeError):
        ImageField(8)("picture.jpg")  # type: ignore[arg-type]


def test_many_threads_see_what_one_sees() -> None:
    field = ImageField(64, crop="random")
    files = [FILES[name] for name in ("jpeg 0", "jpeg 4:2:0 1", "png 1", "webp 0", "grey")] * 6
    expected = [pixels_of(field, data, seed) for seed, data in enumerate(files)]
    found: list[Any] = [None] * len(files)

    def work(first: int) -> None:
        for i in range(first, len(files), 4):
            found[i] = pixels_of(field, files[i], i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


FIELDS = [
    ImageField(224),
    ImageField((96, 128), crop="center", channels=1, decoder="pillow"),
    ImageField(64, crop="random", scale=(0.2, 0.9), ratio=(1.0, 2.0)),
]


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_it_is_plain_data(field: ImageField) -> None:
    for same in (pickle.loads(pickle.dumps(field)), copy.deepcopy(field), eval(repr(field))):  # noqa: S307
        assert same == field
        assert hash(same) == hash(field)
        assert torch.equal(*(f(FILES["png 0"], np.random.default_rng(0)) for f in (same, field)))
    assert sum(field == other for other in FIELDS) == 1
    assert field != "ImageField"
    assert all(isinstance(value, str | int | tuple) for value in vars(field).values())


def test_yaml() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--field", type=ImageField)
    name = f"{ImageField.__module__}.ImageField"
    text = {"class_path": name, "init_args": {"size": [96, 128], "crop": "random", "scale": [0.2, 0.9]}}
    config = parser.parse_object({"field": text})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    assert instantiate(config)["field"] == ImageField((96, 128), crop="random", scale=(0.2, 0.9))
    again = parser.parse_string(parser.dump(config))
    assert instantiate(again)["field"] == ImageField((96, 128), crop="random", scale=(0.2, 0.9))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 0}, "size must be"),
        ({"size": True}, "size must be"),
        ({"size": 2.5}, "size must be"),
        ({"size": "224"}, "size must be"),
        ({"size": (1, 2, 3)}, "size must be"),
        ({"size": (5, -1)}, "size must be"),
        ({"size": (5, True)}, "size must be"),
        ({"size": 10**6}, "more than 89478485 pixels"),
        ({"crop": "centre"}, "crop must be 'center', 'resize' or 'random', got 'centre'"),
        ({"crop": None}, "crop must be"),
        ({"channels": 4}, "channels must be 3"),
        ({"channels": True}, "channels must be 3"),
        ({"decoder": "simple-jpeg"}, "decoder must be 'simplejpeg', 'auto', 'opencv', 'torchvision' or 'pillow', got"),
        ({"crop": "random", "scale": (0, 1)}, "scale must be two numbers, 0 < low <= high <= 1, got"),
        ({"crop": "random", "scale": (0.5, 0.4)}, "scale must be"),
        ({"crop": "random", "scale": (0.5, 1.1)}, "scale must be"),
        ({"crop": "random", "scale": 0.5}, "scale must be"),
        ({"crop": "random", "ratio": (0.0, 1.0)}, "ratio must be two numbers, 0 < low <= high, got"),
        ({"crop": "random", "ratio": (1.0, float("inf"))}, "ratio must be"),
        ({"crop": "random", "ratio": (float("nan"), 1.0)}, "ratio must be"),
        ({"crop": "center", "scale": (0.5, 1.0)}, "no effect with crop='center'"),
        ({"ratio": (1.0, 1.0)}, "no effect with crop='resize'"),
    ],
)
def test_arguments_that_are_none(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        ImageField(**{"size": 8, **arguments})
    assert said in str(caught.value)


def test_a_decoder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoders, "_is_installed", lambda decoder: False)
    for name in ("auto", "torchvision"):
        with pytest.raises(MissingExtraError, match="pip install"):
            ImageField(8, decoder=name)
