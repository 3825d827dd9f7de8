"""``--image KEY=SIZE``: how it is written, what it stands for in a store, and what is wrong with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_speedkit.cli.image_option import check_images, image_fields, parse_image
from lightning_speedkit.data import ImageField, LMDBDataset, write_lmdb


class _WrongError(Exception):
    pass


def wrong(message: str) -> NoReturn:
    raise _WrongError(message)


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("image=224", ("image", 224)),
        ("0=32", ("0", 32)),
        ("a=b=8", ("a=b", 8)),
        ("=8", ("", 8)),
        ("a=9459", ("a", 9459)),
    ],
)
def test_what_can_be_written(text: str, image: tuple[str, int]) -> None:
    assert parse_image(text) == image


@pytest.mark.parametrize("text", ["image", "", "image=", "image=0", "image=-3", "image=big", "image=²", "image=9460"])
def test_what_cannot_be_written(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"KEY=SIZE|pixels"):  # 9459 squared is below 89,478,485
        parse_image(text)


@pytest.mark.parametrize(
    ("sample", "key", "place"),
    [
        ((b"x", 1), "0", "[0]"),
        ((1, b"x"), "1", "[1]"),
        ((b"x", 1), "[0]", "[0]"),
        ({"image": b"x", "label": 1}, "image", "['image']"),
        ({"image": b"x"}, "['image']", "['image']"),
        ({"a=b": b"x"}, "a=b", "['a=b']"),
        ({"0": b"x"}, "0", "['0']"),
        ({"a": (1, b"x")}, "['a'][1]", "['a'][1]"),
        (b"x", "", ""),
    ],
)
def test_a_key_finds_its_field(sample: Any, key: str, place: str) -> None:
    path = Path(write_lmdb([sample], "a.lmdb"))
    images = [parse_image(f"{key}=16")]
    check_images(images, [path], wrong)
    fields = image_fields(images, path)
    assert fields == {place: ImageField(16)}
    assert list(LMDBDataset(path, fields=fields).leaf_fields().values()) == [ImageField(16)]


@pytest.mark.parametrize(
    ("sample", "key", "message"),
    [
        (
            (b"x", 1),
            "image",
            "has no encoded bytes at 'image'. Fields of encoded bytes: '0'. Did you mean --image 0=16?",
        ),
        ((b"x", 1), "1", "Did you mean --image 0=16?"),
        ((b"x", 1), "-1", "Did you mean --image 0=16?"),
        ({"left": b"x", "right": b"x"}, "rigth", "'left', 'right'. Did you mean --image right=16?"),
        ({"image": "text"}, "image", "has no field of encoded bytes; leave out --image"),
        ({"a": {"b": b"x"}}, "b", "Did you mean --image ['a']['b']=16?"),
        (b"x", "image", "Fields of encoded bytes: ''. Did you mean --image =16?"),
        ((1.0,), "0", "has no field of encoded bytes; leave out --image"),
    ],
)
def test_a_wrong_key_is_told_with_what_to_type(sample: Any, key: str, message: str) -> None:
    path = Path(write_lmdb([sample], "a.lmdb"))
    with pytest.raises(_WrongError) as raised:
        check_images([(key, 16)], [path], wrong)
    assert str(raised.value).startswith(f"--image {key}=16: {path} has no ")
    assert str(raised.value).endswith(message)


def test_one_field_twice_is_refused_and_no_option_opens_nothing() -> None:
    with pytest.raises(_WrongError, match="--image 0 is given twice"):
        check_images([("0", 8), ("0", 9)], [Path("nowhere.lmdb")], wrong)
    check_images([], [Path("nowhere.lmdb")], wrong)
    assert image_fields([], Path("nowhere.lmdb")) == {}
