"""The demo's data: 1,797 real handwritten digits, rendered to the folders of image files that people have.

The package holds the digits as one array of 8 by 8 pixels with values from 0 to 16: the test part of the "Optical
Recognition of Handwritten Digits" data set, E. Alpaydin and C. Kaynak, 1998, https://doi.org/10.24432/C50P49, licensed
under CC BY 4.0. :func:`write_image_folder` enlarges each one smoothly and writes it as a PNG file,
``folder/train/7/0042.png``; :class:`DigitFiles` reads such a file the usual way, decoded by Pillow for every sample of
every epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_speedkit.errors import MissingExtraError

__all__ = [
    "IMAGE_SIZE",
    "SPLITS",
    "DigitFiles",
    "DiskUse",
    "decoded_samples",
    "disk_use",
    "load_digits",
    "payload_bytes",
    "render_digit",
    "split_indices",
    "to_network_input",
    "write_image_folder",
]

IMAGE_SIZE = 64
SPLITS = ("train", "val", "test")
_SPLIT_SIZES = {"train": 1197, "val": 200, "test": 400}
_MEAN, _STD = 0.3097, 0.3485  # of the rendered pixels of the train split, on a scale from 0 to 1


def load_digits() -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """All digits: images as uint8 of shape ``(1797, 8, 8)`` with values from 0 to 16, and labels as uint8.

    >>> images, labels = load_digits()
    >>> images.shape, int(images.max()), labels[:5].tolist()
    ((1797, 8, 8), 16, [0, 1, 2, 3, 4])
    """
    with (
        as_file(files("lightning_speedkit.demo") / "digits.npz") as path,
        numpy.load(path, allow_pickle=False) as archive,
    ):
        return archive["images"], archive["labels"]


def split_indices(split: str) -> list[int]:
    """Which digits belong to ``"train"`` (1,197), ``"val"`` (200) or ``"test"`` (400): a fixed random partition.

    >>> [len(split_indices(split)) for split in SPLITS]
    [1197, 200, 400]
    """
    if split not in _SPLIT_SIZES:
        raise ValueError(f"There is no split {split!r}; use one of {', '.join(SPLITS)}.")
    order = numpy.random.RandomState(0).permutation(sum(_SPLIT_SIZES.values()))
    start = 0
    for name in SPLITS:
        if name == split:
            break
        start += _SPLIT_SIZES[name]
    return sorted(int(index) for index in order[start : start + _SPLIT_SIZES[split]])


def render_digit(pixels: numpy.ndarray[Any, Any], size: int = IMAGE_SIZE) -> Any:
    """One digit as a grey ``PIL.Image.Image`` of ``size`` by ``size`` pixels, enlarged with smooth edges.

    >>> render_digit(load_digits()[0][0]).size
    (64, 64)
    """
    image_module = _pillow()
    small = image_module.fromarray((pixels.astype(numpy.float32) * (255 / 16)).round().astype(numpy.uint8))
    return small.resize((size, size), image_module.Resampling.BICUBIC)


def write_image_folder(
    folder: str | os.PathLike[str],
    *,
    size: int = IMAGE_SIZE,
    limit: int | None = None,
    advance: Callable[[], None] | None = None,
) -> int:
    """Writes the digits as PNG files in class folders, ``folder/<split>/<label>/<number>.png``.

    Args:
        folder: Where to write; it is made if it does not exist.
        size: Width and height of an image in pixels.
        limit: At most that many images per split, for a quick look.
        advance: Called after each file.

    Returns:
        How many files were written.
    """
    images, labels = load_digits()
    written = 0
    for split in SPLITS:
        for index in split_indices(split)[:limit]:
            path = Path(folder, split, str(labels[index]), f"{index:04d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            render_digit(images[index], size).save(path)
            written += 1
            if advance is not None:
                advance()
    return written


class DigitFiles(Dataset[tuple[Tensor, int]]):
    """The images of a folder of class folders, opened and decoded one by one as they are asked for.

    Args:
        folder: One split, with a folder per label in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.samples = _labelled_files(folder)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return to_network_input(_decode(path)), label


def decoded_samples(folder: str | os.PathLike[str]) -> Iterator[tuple[Tensor, int]]:
    """Every image of a split, decoded to uint8 of shape ``(1, height, width)``, with its label; what a store keeps."""
    for path, label in _labelled_files(folder):
        yield _decode(path), label


def to_network_input(images: Tensor) -> Tensor:
    """Pixels as float32, shifted and scaled to mean 0 and deviation 1; for one image or a whole batch, on any device.

    It treats each pixel alone, so a batch gives bit for bit what its images give one by one.

    >>> to_network_input(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-0.8887,  1.9808])
    """
    return (images.float() / 255 - _MEAN) / _STD


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What files take on disk: their sizes added up, and the blocks that they and their folders were given."""

    files: int
    apparent_bytes: int
    allocated_bytes: int


def disk_use(path: str | os.PathLike[str]) -> DiskUse:
    """Measures a file, or a folder and all that is in it."""
    root = Path(path)
    found = [root, *root.rglob("*")]
    stats = [entry.stat() for entry in found]
    sizes = [stat.st_size for entry, stat in zip(found, stats, strict=True) if entry.is_file()]
    allocated = sum(getattr(stat, "st_blocks", 0) * 512 for stat in stats)
    return DiskUse(files=len(sizes), apparent_bytes=sum(sizes), allocated_bytes=allocated)


def payload_bytes(folder: str | os.PathLike[str]) -> int:
    """The bytes of the decoded images of a split and of their int64 labels, without anything around them."""
    return sum(image.nbytes + torch.tensor(label).nbytes for image, label in decoded_samples(folder))


def _labelled_files(folder: str | os.PathLike[str]) -> list[tuple[str, int]]:
    found = [(str(path), int(path.parent.name)) for path in sorted(Path(folder).glob("*/*.png"))]
    if not found:
        raise FileNotFoundError(f"There are no images in {folder}; write_image_folder() makes them.")
    return found


def _decode(path: str) -> Tensor:
    with _pillow().open(path) as image:
        return torch.from_numpy(numpy.array(image.convert("L"))).unsqueeze(0)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("the demo", extra="demo", library="pillow") from error
    return Image
