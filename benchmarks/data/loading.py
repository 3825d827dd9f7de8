"""The variants and bars of the three sets of samples; ``tensors``, ``large`` and ``images`` run them."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from benchmarks.data.bars import Bar, held_against
from benchmarks.data.datasets import dataset
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

__all__ = ["PEERS", "bars", "run", "variants"]

PEERS = {  # and their modules
    "litdata": "litdata",
    "webdataset": "webdataset",
    "mds": "streaming",
    "hugging_face": "datasets",
    "ffcv": "ffcv",
}
_ELSEWHERE = "FFCV_PYTHON"  # the environment variable that names a Python with FFCV
_BARE = {"tensors": "copying", "large": "copying", "images": "decoding"}
_MEASURE = "benchmarks.data.measuring:measure"
_NAIVE = "naive LMDB, 2 workers"
_TRAINER = "benchmarks.data.through_trainer:measure"


def variants(data: str, *, epochs: int, small: bool) -> list[Variant]:
    """Every way to load a set of samples, with two workers and without.

    ``epochs`` are timed of what loads an epoch in about a second, and one of what takes many.
    """
    fast = ("limits", "ours", "ffcv")

    def variant(name: str, way: str, workers: int, function: str = _MEASURE, **more: Any) -> Variant:
        arguments = {
            "way": f"benchmarks.data.{way}",
            "data": data,
            "workers": workers,
            "epochs": epochs if any(part in fast for part in way.split(".")) else 1,
            "small": small,
        }
        return Variant(name, function, {**arguments, **more})

    limit = f"limits.{_BARE[data]}"
    found = [variant("limit, 1 thread", limit, 1), variant("limit, 2 threads", limit, 2)]
    if data == "images":
        found.append(variant("limit, coarse pictures, 2 threads", "limits.coarse_decoding", 2))
    found += [
        variant("ours, 2 threads", "ours.threads", 2),
        variant("ours, 2 processes", "ours.processes", 2),
        variant("ours, no worker", "ours.inline", 0),
        variant("ours, 2 threads, Trainer", "ours.threads", 2, _TRAINER),
        variant("naive LMDB, 2 workers", "naive.lmdb", 2),
        variant("naive LMDB, no worker", "naive.lmdb", 0),
        variant("naive LMDB, 2 workers, Trainer", "naive.lmdb", 2, _TRAINER),
        variant("one file per sample, 2 workers", "naive.files", 2),
    ]
    for peer, module in PEERS.items():
        function = "benchmarks.data.measuring:elsewhere" if peer == "ffcv" else _MEASURE
        more = {"interpreter": _ELSEWHERE} if peer == "ffcv" else {}
        here = peer != "ffcv" or not os.environ.get(_ELSEWHERE)
        added = variant(f"{peer}, 2 workers", f"peers.{peer}", 2, function, **more)
        found.append(replace(added, requires=module if here else None))
    return found


def bars(data: str) -> list[Bar]:
    """What is asked of the loader with two threads."""

    def bar(least: float, against: str) -> Bar:
        return Bar(f"{data}: ours over {against}", "ours, 2 threads", against, least=least)

    if data == "tensors":
        peers = [bar(1.1 if peer == "ffcv" else 1.0, f"{peer}, 2 workers") for peer in PEERS]
        return [bar(0.65, "limit, 1 thread"), bar(10, "naive LMDB, 2 workers"), *peers]
    if data == "large":
        return [bar(1.0, "limit, 1 thread"), bar(10, "naive LMDB, 2 workers"), bar(2, "ffcv, 2 workers")]
    return [bar(0.90, "limit, 2 threads"), bar(2, "ffcv, 2 workers"), bar(2, "litdata, 2 workers")]


def run(data: str) -> None:
    """Measure, write ``data_<name>.json``, and tell which bars are met."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone, beside naive LMDB")
    arguments = benchmark_arguments(f"Loading: {dataset(data, small=True).name}.", rounds=5, parent=parser)
    small = arguments.smoke
    dataset(data, small=small)
    chosen = variants(data, epochs=1 if small else 4, small=small)
    if arguments.only:
        chosen = [variant for variant in chosen if variant.name in (_NAIVE, *arguments.only)]
    content = run_benchmark(
        f"data_{data}_only" if arguments.only else f"data_{data}",
        chosen,
        baseline=_NAIVE,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        timeout=600,
        higher_is_better=["samples_per_second", "bytes_per_second"],
        results=arguments.results,
    )
    names = {variant.name for variant in chosen}
    decided = [bar for bar in bars(data) if {bar.variant, bar.against} <= names]
    held_against(content, decided, arguments.results)
