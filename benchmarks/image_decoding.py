"""JPEG files in memory to 224 x 224 pixels in a batch, on two threads: decoders and filters side by side.

``small`` are pictures of about 0.1 million pixels, ``large`` of 0.7 million, cut from two photographs that come with
scikit-learn. ``bare`` is a loop that calls the libraries and nothing else; ``field`` is ``ImageField``. Only variants
with the same filter make the same pictures: ``area`` and ``linear`` are OpenCV's filters, of which the second aliases.

    python -m benchmarks.image_decoding [--rounds 7] [--smoke]
"""

from __future__ import annotations

import importlib.util
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

Pixels = NDArray[np.uint8]
Decode = Callable[[bytes, Pixels], Any]
SIDE = 224


def measure(way: str, decoder: str, seconds: float) -> dict[str, float]:
    """Pictures per second of two threads, for small and for large files."""
    small, large = _files()
    decode = _WAYS[way](decoder)
    return {
        "small_pictures_per_second": _rate(decode, small, seconds),
        "large_pictures_per_second": _rate(decode, large, seconds),
    }


def _files() -> tuple[list[bytes], list[bytes]]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(np.array(image)) for image in load_sample_images().images]
    rng = np.random.default_rng(0)

    def file(number: int, height: int, width: int) -> bytes:
        out = io.BytesIO()
        picture = photographs[number % 2].resize((width, height), Image.Resampling.BICUBIC)
        picture.save(out, "JPEG", quality=90, subsampling=2)
        return out.getvalue()

    sides = [(int(side), int(side * ratio)) for side, ratio in rng.uniform((200, 0.75), (400, 1.4), (64, 2))]
    return [file(i, *size) for i, size in enumerate(sides)], [file(i, 700 + i, 1000 + i) for i in range(8)]


def _rate(decode: Decode, files: list[bytes], seconds: float) -> float:
    counts = [0, 0]
    end = time.perf_counter() + seconds

    def work(thread: int) -> None:
        batch = np.zeros((32, SIDE, SIDE, 3), np.uint8)
        done = 0
        while time.perf_counter() < end:
            decode(files[(2 * done + thread) % len(files)], batch[done % 32])
            done += 1
        counts[thread] = done

    decode(files[0], np.zeros((SIDE, SIDE, 3), np.uint8))  # the imports
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def _field(decoder: str) -> Decode:
    from lightning_speedkit.data.images.image_field import ImageField

    return ImageField(SIDE, decoder=decoder).decode_into


def _bare(decoder: str) -> Decode:
    import torch

    read = _reader(decoder)
    resize = torch.ops.aten._upsample_bilinear2d_aa.out

    def decode(data: bytes, out: Pixels) -> None:
        picture = torch.from_numpy(read(data)[None]).permute(0, 3, 1, 2)
        resize(picture, (SIDE, SIDE), False, None, None, out=torch.from_numpy(out[None]).permute(0, 3, 1, 2))

    return decode


def _with_opencv(filter_: str) -> Callable[[str], Decode]:
    def make(decoder: str) -> Decode:
        import cv2

        cv2.setNumThreads(0)
        read, interpolation = _reader(decoder), getattr(cv2, filter_)
        return lambda data, out: cv2.resize(read(data), (SIDE, SIDE), dst=out, interpolation=interpolation)

    return make


def _pillow_alone(_decoder: str) -> Decode:
    from PIL import Image

    def decode(data: bytes, out: Pixels) -> None:
        with Image.open(io.BytesIO(data)) as image:
            out[:] = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    return decode


def _reader(decoder: str) -> Callable[[bytes], Pixels]:
    if decoder == "simplejpeg":
        import simplejpeg

        return lambda data: simplejpeg.decode_jpeg(data, "RGB")
    import cv2

    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), flags)


_WAYS: dict[str, Callable[[str], Decode]] = {
    "field": _field,
    "bare": _bare,
    "area": _with_opencv("INTER_AREA"),
    "linear": _with_opencv("INTER_LINEAR"),
    "pillow": _pillow_alone,
}


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("JPEG files to 224 x 224 pixels: decoders and filters.", 7)
    seconds = 0.05 if options.smoke else 2.0
    variants = [
        ("simplejpeg, bare", "bare", "simplejpeg", None),
        ("simplejpeg, bare again", "bare", "simplejpeg", None),
        ("simplejpeg, field", "field", "simplejpeg", None),
        ("simplejpeg, OpenCV area", "area", "simplejpeg", None),
        ("simplejpeg, OpenCV linear", "linear", "simplejpeg", None),
        ("OpenCV, bare", "bare", "opencv", None),
        ("OpenCV, field", "field", "opencv", "OpenCV, bare"),
        ("Pillow alone", "pillow", "pillow", None),
        ("Pillow, field", "field", "pillow", "Pillow alone"),
    ]
    if importlib.util.find_spec("torchvision"):
        variants.append(("torchvision, field", "field", "torchvision", None))
    run_benchmark(
        "image_decoding",
        [
            Variant(
                name, "benchmarks.image_decoding:measure", {"way": way, "decoder": decoder, "seconds": seconds}, base
            )
            for name, way, decoder, base in variants
        ],
        baseline="simplejpeg, bare",
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        higher_is_better=("small_pictures_per_second", "large_pictures_per_second"),
        results=options.results,
    )


if __name__ == "__main__":
    main()
