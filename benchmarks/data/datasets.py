"""The three sets of samples that every way to load is given, made once in a cache folder.

``tensors``: 20,000 of uint8 (3, 64, 64), 12 KB each. ``large``: 2,000 of float32 (3, 224, 224), 602 KB each. Both are
random numbers, in which no format can find anything to compress; the first value of a row says which it is.
``images``: 3,000 JPEG files of about 0.1 million pixels and 22 KB,
cut from two photographs that were enlarged twofold, quality 90, loaded as uint8 (3, 224, 224). A sample is ``(x, y)``
with the label ``y``, an int; that of a picture is its number.

The folder is that of the environment variable ``SPEEDKIT_BENCHMARK_DATA``, else one under ``~/.cache``. It should lie
on a local disk. What another library needs is written beside the samples when it is asked for first.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAMES", "SIZE", "Data", "cache_folder", "dataset"]

SIZE = 224  # of a picture in a batch
_TOLERANCE = (
    16.0  # mean difference of a picture, in levels of 255; decoders and filters differ by less, samples by more
)


@dataclass(frozen=True)
class Data:
    """A set of samples. ``small`` ones have a few hundred, for tests and smoke runs."""

    name: str
    samples: int
    batch: int
    shape: tuple[int, ...]
    dtype: str
    folder: Path

    @property
    def encoded(self) -> bool:
        """Whether a sample is kept as a JPEG file."""
        return self.name == "images"

    @property
    def bytes_per_sample(self) -> int:
        """In a batch."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def label(self, number: int) -> int:
        return number if self.encoded else number * 7919 % 1000

    def rows(self) -> NDArray[Any]:
        """All samples that are not encoded, mapped into memory."""
        rows: NDArray[Any] = np.load(self.folder / "rows.npy", mmap_mode="r")
        return rows

    def jpegs(self) -> list[bytes]:
        """All samples that are encoded."""
        ends = np.load(self.folder / "ends.npy").tolist()
        data = (self.folder / "jpegs.bin").read_bytes()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def pairs(self) -> Iterator[tuple[Any, int]]:
        """``(x, y)`` with ``x`` an array, or the bytes of a JPEG file."""
        rows = self.jpegs() if self.encoded else self.rows()
        for number in range(self.samples):
            row = rows[number]
            yield (row if isinstance(row, bytes) else np.array(row)), self.label(number)

    def made(self, name: str, make: Callable[[Data, Path], None]) -> Path:
        """A file or folder in another format, made at the first call; half of one is never left at its name."""
        target = self.folder / name
        if not target.exists():
            scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self.folder))
            try:
                make(self, scratch / name)
                (scratch / name).rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return target

    def numbers_of(self, x: Any, y: Any) -> list[int]:
        """Which samples a batch holds; raises ``ValueError`` if one differs from what was written, or its label."""
        x, y = np.asarray(x), np.asarray(y).reshape(-1).tolist()
        if x.shape != (len(y), *self.shape) or x.dtype != self.dtype:
            raise ValueError(f"A batch of {x.dtype} {x.shape} with {len(y)} labels.")
        if self.encoded:
            numbers = y
        else:
            heads = np.ascontiguousarray(x.reshape(len(y), -1)[:, :4])
            numbers = (heads.view("<u4") if self.dtype == "uint8" else heads)[:, 0].astype(int).tolist()
        for number, row, label in zip(numbers, x, y, strict=True):
            if label != self.label(number) or not self._is(number, row):
                raise ValueError(f"Sample {number} with the label {label} is not what was written.")
        return numbers

    def _is(self, number: int, row: NDArray[Any]) -> bool:
        if not self.encoded:
            return bool(np.array_equal(row, self.rows()[number]))
        from PIL import Image

        picture = Image.open(io.BytesIO(self.jpegs()[number])).convert("RGB")
        width, height = picture.size
        cut = (abs(width - height)) // 2
        square = (cut, 0, width - cut, height) if width > height else (0, cut, width, height - cut)
        wanted = (np.asarray(part.resize((SIZE, SIZE)), dtype=float) for part in (picture, picture.crop(square)))
        return any(np.abs(row.transpose(1, 2, 0) - each).mean() < _TOLERANCE for each in wanted)


_FULL = {
    "tensors": (20_000, 128, (3, 64, 64), "uint8"),
    "large": (2_000, 32, (3, 224, 224), "float32"),
    "images": (3_000, 64, (3, SIZE, SIZE), "uint8"),
}
_SMALL_SAMPLES = {"tensors": 600, "large": 70, "images": 90}
NAMES = tuple(_FULL)


def cache_folder() -> Path:
    """Where the samples are kept."""
    chosen = os.environ.get("SPEEDKIT_BENCHMARK_DATA")
    return Path(chosen) if chosen else Path.home() / ".cache" / "lightning-speedkit-benchmarks"


def dataset(name: str, *, small: bool = False) -> Data:
    """One of :data:`NAMES`, made if it is not there yet."""
    samples, batch, shape, dtype = _FULL[name]
    samples, batch = (_SMALL_SAMPLES[name], 16) if small else (samples, batch)
    folder = cache_folder() / (f"{name}-small" if small else name)
    data = Data(name, samples, batch, shape, dtype, folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
        (_write_jpegs if data.encoded else _write_rows)(data, scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return data


def _write_rows(data: Data, folder: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (data.samples, *data.shape)
    rows = np.lib.format.open_memmap(folder / "rows.npy", mode="w+", dtype=np.dtype(data.dtype), shape=shape)
    for number in range(data.samples):
        if data.dtype == "uint8":
            row = rng.integers(0, 256, size=data.shape, dtype=np.uint8)
            row.reshape(-1)[:4] = np.frombuffer(np.uint32(number).tobytes(), np.uint8)
        else:
            row = rng.standard_normal(data.shape, dtype=np.float32)
            row.reshape(-1)[0] = number
        rows[number] = row
    rows.flush()


def _write_jpegs(data: Data, folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(photograph) for photograph in load_sample_images().images]
    photographs = [each.resize((2 * each.width, 2 * each.height), Image.Resampling.LANCZOS) for each in photographs]
    ends, total = [], 0
    with (folder / "jpegs.bin").open("wb") as file:
        for number in range(data.samples):
            photograph = photographs[number % len(photographs)]
            width, height = (int(side) for side in rng.integers(240, 391, size=2))
            left = int(rng.integers(0, photograph.width - width + 1))
            top = int(rng.integers(0, photograph.height - height + 1))
            part = photograph.crop((left, top, left + width, top + height))
            if rng.random() < 0.5:
                part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            encoded = io.BytesIO()
            part.save(encoded, "JPEG", quality=90)
            total += file.write(encoded.getbuffer())
            ends.append(total)
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))
