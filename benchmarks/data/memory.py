"""The memory of the loader beyond the interpreter and its ring, with a store of 200 MB and one of 4 GB, 50 epochs long.

Counted is what is not a cached file: anonymous and shared memory, of all processes together, what they share once. The
interpreter is the same process with everything imported, before the loader is made. The ring is what its slots take.

    python -m benchmarks.data.memory [--rounds 3] [--smoke]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data.bars import Bar, held_against
from benchmarks.data.datasets import cache_folder
from benchmarks.data.measuring import held_bytes
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

__all__ = ["measure", "write"]

_SHAPE = (3, 64, 64)
_BATCH = 128
_LIMIT = 100e6


def measure(megabytes: int, kind: str, workers: int, epochs: int) -> dict[str, float]:
    """The most that was held beyond interpreter and ring, and what was added after the second epoch."""
    from benchmarks.data import ours  # noqa: F401 - all that is imported, before the interpreter is weighed
    from lightning_speedkit.data import LMDBDataset, RingLoader

    path = _store(megabytes)
    interpreter = held_bytes()
    loader = RingLoader(
        LMDBDataset(path), batch_size=_BATCH, shuffle=True, workers=kind, num_workers=workers if workers else None
    )
    held, early = 0, 0
    try:
        for epoch in range(epochs):
            for number, _ in enumerate(loader):
                if number % 500 == 0:
                    held = max(held, held_bytes())
            if epoch == 1:
                early = held_bytes()
        end = held_bytes()
        ring = _ring_bytes(loader)
    finally:
        loader.close()
    return {
        "beyond_ring_bytes": float(max(held, end) - interpreter - ring),
        "growth_bytes": float(end - early),
        "ring_bytes": float(ring),
        "interpreter_bytes": float(interpreter),
    }


def _ring_bytes(loader: Any) -> int:
    ring = loader._crew._ring
    return int(ring.slots * ring.slot_bytes)


def _store(megabytes: int) -> Path:
    return cache_folder() / f"memory-{megabytes}.lmdb"


def write(megabytes: int) -> None:
    """Random tensors of 12 KB, so many megabytes of them, unless they are there."""
    import torch

    from lightning_speedkit.data import write_lmdb

    path = _store(megabytes)
    if not path.exists():
        sample = torch.randint(0, 256, _SHAPE, dtype=torch.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lmdb(((sample, number) for number in range(megabytes * 10**6 // sample.numel())), path)


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Memory of the loader.", rounds=3)
    small, large, epochs = (2, 8, 4) if arguments.smoke else (200, 4000, 50)
    for megabytes in (small, large):
        write(megabytes)  # here, so that the memory of writing is in no number
    kinds = [("threads", 2), ("processes", 2), ("inline", 0)]
    variants = [
        Variant(
            f"{kind}, {megabytes} MB",
            "benchmarks.data.memory:measure",
            {"megabytes": megabytes, "kind": kind, "workers": workers, "epochs": epochs},
        )
        for kind, workers in kinds
        for megabytes in (small, large)
    ]
    content = run_benchmark(
        "data_memory",
        variants,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        timeout=1800,
        results=arguments.results,
    )
    bars = []
    for variant in variants:
        bars.append(Bar(f"{variant.name}: beyond ring", variant.name, metric="beyond_ring_bytes", most=_LIMIT))
        bars.append(Bar(f"{variant.name}: growth", variant.name, metric="growth_bytes", most=10e6))
    held_against(content, bars, arguments.results)


if __name__ == "__main__":
    main()
