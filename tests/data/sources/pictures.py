"""Small real pictures, written by Pillow."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    """Soft random colours, which JPEG keeps nearly as they are."""
    width, height = size
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def make_tree(root: Path, counts: dict[str, int]) -> dict[str, bytes]:
    """``counts`` pictures per class folder; the bytes of each file by its path below ``root``."""
    files = {}
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            name = f"{folder}/{i:03d}.{'jpg' if i % 2 else 'png'}"
            files[name] = encoded(picture(len(files)), "JPEG" if i % 2 else "PNG")
            (root / name).write_bytes(files[name])
    return files
