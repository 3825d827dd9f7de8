"""``--image KEY=SIZE``: which fields of a store are pictures, and a wrong one told as a wrong command line."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lightning_speedkit.errors import nearest_names

if TYPE_CHECKING:
    from lightning_speedkit.data.images.image_field import ImageField

__all__ = ["check_images", "encoded_pictures", "image_fields", "parse_image"]

Image = tuple[str, int]
"""The key, position or place in a sample as it was written, and the size in pixels."""


def parse_image(text: str) -> Image:
    """The place and the size of ``"image=224"``, ``"0=224"``, or ``"=224"`` for samples that are pictures themselves.

    >>> parse_image("0=224")
    ('0', 224)
    """
    from lightning_speedkit.data.images.image_header import MAX_PIXELS

    key, equals, size = text.rpartition("=")
    if not equals or not (size.isascii() and size.isdigit()) or int(size) < 1:
        raise argparse.ArgumentTypeError(f"must be KEY=SIZE, such as image=224 or 0=224, got {text!r}")
    if int(size) ** 2 > MAX_PIXELS:
        raise argparse.ArgumentTypeError(f"{text}: {size} x {size} are more than {MAX_PIXELS:,} pixels")
    return key, int(size)


def image_fields(images: Sequence[Image], path: Path) -> dict[str | int, ImageField]:
    """How each of the fields of a store is decoded, by its place; after :func:`check_images`."""
    from lightning_speedkit.data.images.image_field import ImageField

    place_of = {typed: place for place, typed in _encoded(path).items()} if images else {}
    return {place_of.get(key, key): ImageField(size) for key, size in images}


def check_images(images: Sequence[Image], stores: Iterable[Path], wrong: Callable[[str], NoReturn]) -> None:
    """Tell ``wrong`` of a field that one of the stores does not have, or not as encoded bytes, or that comes twice."""
    if not images:
        return
    twice = [key for key, count in Counter(key for key, _ in images).items() if count > 1]
    if twice:
        wrong(f"--image {twice[0]} is given twice: a field has one size")
    for path in stores:
        there = _encoded(path)
        for key, size in images:
            if key in there.values() or key in there:
                continue
            if not there:
                wrong(f"--image {key}={size}: {path} has no field of encoded bytes; leave out --image")
            names = list(there.values())
            near = nearest_names(key, names, most=1) or names[:1]
            wrong(
                f"--image {key}={size}: {path} has no encoded bytes at {key!r}. Fields of encoded bytes: "
                f"{', '.join(map(repr, names))}. Did you mean --image {near[0]}={size}?"
            )


def encoded_pictures(path: Path) -> list[str]:
    """Which fields of the first sample are encoded pictures, as ``--image`` names them."""
    from lightning_speedkit.data.store import encoded_pictures as found

    return list(found.encoded_pictures(path).values())


def _encoded(path: Path) -> dict[str, str]:
    """The places of encoded bytes in a sample, such as ``['image']``, and how each is written on the command line."""
    from lightning_speedkit.data.store.encoded_pictures import encoded_bytes

    return encoded_bytes(path)
