"""Samples per second when a dataset is written, and the size of the result, against plain files and per-sample commits.

Four ways to write the same samples, which lie in memory: one file of their bytes, a write for each sample, and a sync
at the end; the same in pieces of 1 MiB, made before the clock starts, which is what the disk can do; ``write_lmdb``;
and what many tutorials show, an LMDB transaction for each sample, each of them synced (a part of the samples, as it is
slow). All on the disk of the temporary folder, which must not be a memory file system: set TMPDIR if it is.

    python -m benchmarks.data_writing [--rounds 5] [--smoke]
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.data_writing:measure"
_PIECE = 1 << 20


def measure(way: str, kind: str, count: int) -> dict[str, float]:
    """Write that many samples of a kind; ``file_bytes_per_payload_byte`` is what they take on the disk."""
    import torch

    from lightning_speedkit.measure.file_system import read_file_system

    torch.set_num_threads(1)
    samples = _samples(kind, count)
    payload = sum(len(_bytes_of(sample)) for sample in samples)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if read_file_system(folder).kind == "memory":
            raise OSError(f"{folder} is memory, not a disk; set TMPDIR to a folder on a disk.")
        write = _WAYS[way](samples)
        write(samples[: max(len(samples) // 100, 2)], folder / "warm-up")
        _remove(folder / "warm-up")
        os.sync()
        path = folder / "data"
        start = time.perf_counter()
        write(samples, path)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in _files(path) if "lock" not in file.name)
    return {
        "samples_per_second": len(samples) / seconds,
        "megabytes_per_second": payload / seconds / 1e6,
        "file_bytes_per_payload_byte": size / payload,
    }


def _samples(kind: str, count: int) -> list[tuple[Any, int]]:
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(0)
    if kind == "tensor":
        images = torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8, generator=generator)
        return [(image, label) for label, image in enumerate(images)]
    if kind == "large":
        return [(torch.rand(3, 224, 224, generator=generator), label) for label in range(count)]
    source = np.random.default_rng(0)  # as JPEG files are: bytes that do not compress, of very different sizes
    sizes = np.clip(source.lognormal(np.log(20_000), 0.45, count), 2_000, 200_000).astype(int)
    return [(source.bytes(size), label) for label, size in enumerate(sizes)]


def _bytes_of(sample: tuple[Any, int]) -> bytes:
    value, label = sample
    return (value if isinstance(value, bytes) else value.numpy().tobytes()) + label.to_bytes(8, "little")


def _kit(_: Any) -> Callable[[Any, Path], Any]:
    from lightning_speedkit.data import write_lmdb

    return write_lmdb


def _per_sample(_: Any) -> Callable[[Any, Path], Any]:
    def write(samples: list[tuple[Any, int]], path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for value, label in samples:
                file.write(value if isinstance(value, bytes) else value.numpy())
                file.write(label.to_bytes(8, "little"))
            os.fsync(file.fileno())

    return write


def _in_pieces(samples: list[tuple[Any, int]]) -> Callable[[Any, Path], Any]:
    whole = memoryview(b"".join(map(_bytes_of, samples)))

    def write(some: list[tuple[Any, int]], path: Path) -> None:
        data = whole[: len(whole) * len(some) // len(samples)]
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE])
            os.fsync(file.fileno())

    return write


def _per_put(_: Any) -> Callable[[Any, Path], Any]:
    import lmdb

    def write(samples: list[tuple[Any, int]], path: Path) -> None:
        engine = lmdb.open(str(path), map_size=1 << 40)
        for number, (value, label) in enumerate(samples):
            data = value if isinstance(value, bytes) else value.numpy()
            with engine.begin(write=True) as transaction:
                transaction.put(str(number).encode(), pickle.dumps((data, label)))
        engine.close()

    return write


_WAYS = {"kit": _kit, "raw per sample": _per_sample, "raw in pieces": _in_pieces, "transaction per put": _per_put}


def _files(path: Path) -> Iterator[Path]:
    return path.iterdir() if path.is_dir() else iter([path])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Samples per second when a dataset is written.")
    variants = []
    for kind, count, slow in (("tensor", 20_000, 1_000), ("large", 2_000, 200), ("jpeg-like", 10_000, 1_000)):
        if options.smoke:
            count, slow = count // 100, slow // 20
        for way in _WAYS:
            arguments = {"way": way, "kind": kind, "count": slow if way == "transaction per put" else count}
            # what the kit is measured by: its gain over the tutorials, and what the plain files have over it
            baseline = f"{kind}: {'transaction per put' if way in ('kit', 'transaction per put') else 'kit'}"
            variants.append(Variant(f"{kind}: {way}", _FUNCTION, arguments, baseline))
    run_benchmark(
        "data_writing",
        variants,
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        higher_is_better=("samples_per_second", "megabytes_per_second"),
        results=options.results,
    )


if __name__ == "__main__":
    main()
