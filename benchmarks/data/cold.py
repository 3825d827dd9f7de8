"""602 KB samples in random order from a file that is not in memory: the kit's loader beside the usual LMDB map.

Before each run the file is put out of the page cache (``posix_fadvise``, ``DONTNEED``), and ``fincore`` has to confirm
that it left. What a disk or a host below keeps in memory of its own cannot be seen from here; all variants have that
alike. The usual map is the pickle-per-sample store with ``readahead=False``, as everyone advises for random order.
One pass each, of the first batches of an epoch.

    python -m benchmarks.data.cold [--rounds 5] [--smoke]
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.data.bars import Bar, held_against
from benchmarks.data.datasets import dataset
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

__all__ = ["bytes_in_cache", "drop_from_cache", "measure", "read_in_order"]

_LEFT_OVER = 0.02  # of the file may stay: pages in use


def measure(way: str, workers: int, batches: int, small: bool = False) -> dict[str, float]:
    """Samples per second from the first request to the last of ``batches`` batches, the start of workers included."""
    from benchmarks.data import naive, ours

    data = dataset("large", small=small)
    path = data.made("pickles.lmdb", naive.write_pickles) if way == "naive" else ours.store(data)
    opened = {"naive": naive.lmdb, "threads": ours.threads, "processes": ours.processes, "inline": ours.inline}[way]
    drop_from_cache(path)
    left = bytes_in_cache(path)
    if left > _LEFT_OVER * path.stat().st_size:
        raise RuntimeError(f"{left} bytes of {path.name} stayed in the page cache: this is no cold run.")
    with opened(data, workers) as epoch:
        start = time.perf_counter()
        samples = 0
        for number, (_, y) in enumerate(epoch(0), 1):
            samples += len(y)
            if number == batches:
                break
        seconds = time.perf_counter() - start
    rate = samples / seconds
    return {"samples_per_second": rate, "bytes_per_second": rate * data.bytes_per_sample}


def read_in_order(batches: int, small: bool = False) -> dict[str, float]:
    """What the disk gives when the file is read from its beginning, a megabyte at a time."""
    from benchmarks.data import ours

    data = dataset("large", small=small)
    path = ours.store(data)
    drop_from_cache(path)
    wanted, done = min(batches * data.batch * data.bytes_per_sample, path.stat().st_size), 0
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while done < wanted:
            done += file.readinto(buffer) or 0
    rate = done / (time.perf_counter() - start)
    return {"samples_per_second": rate / data.bytes_per_sample, "bytes_per_second": rate}


def drop_from_cache(path: Path) -> None:
    """Ask the kernel to forget the file's pages; what is not written yet is written first."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def bytes_in_cache(path: Path) -> int:
    """How much of a file is in the page cache."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("A cold file in random order.", rounds=5)
    small, batches = arguments.smoke, 3 if arguments.smoke else 30

    def variant(name: str, way: str, workers: int) -> Variant:
        more = {"way": way, "workers": workers, "batches": batches, "small": small}
        return Variant(name, "benchmarks.data.cold:measure", more)

    usual = ["usual map, readahead=False, no worker", "usual map, readahead=False, 2 workers"]
    content = run_benchmark(
        "data_cold",
        [
            variant(usual[0], "naive", 0),
            variant(usual[1], "naive", 2),
            variant("ours, 2 threads", "threads", 2),
            variant("ours, 2 processes", "processes", 2),
            variant("ours, no worker", "inline", 0),
            Variant(
                "limit, file read in order", "benchmarks.data.cold:read_in_order", {"batches": batches, "small": small}
            ),
        ],
        baseline=usual[1],
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=["samples_per_second", "bytes_per_second"],
        results=arguments.results,
    )
    bars = [Bar(f"cold file: ours over {each}", "ours, 2 threads", each, least=10) for each in usual]
    held_against(content, bars, arguments.results)


if __name__ == "__main__":
    main()
