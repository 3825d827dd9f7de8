"""Measures one way to load data: samples per second, processor seconds and memory, over whole epochs.

A way to load is a context manager ``module.function(data, workers)`` that gives a function ``epoch(number)``, which
gives the batches ``(x, y)`` of a shuffled epoch. Epoch 0 fills caches, starts workers and compiles; it is not timed.
Memory is looked at there and after the timed epochs, so that the look costs them nothing.

:func:`measure` runs in a process of its own (``benchmarks/worker.py``). :func:`checked` is for the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.data.datasets import Data, dataset
from benchmarks.processes import descendants
from benchmarks.worker import ROOT

__all__ = ["Batches", "checked", "cpu_seconds", "elsewhere", "held_bytes", "measure"]

Batches = Callable[[int], Iterable[tuple[Any, Any]]]
_LOOKS = 8  # at the memory, within epoch 0


def measure(way: str, data: str, workers: int = 2, epochs: int = 3, small: bool = False) -> dict[str, float]:
    """Load ``epochs`` timed epochs of ``data`` in the way named ``"module.function"``."""
    found = dataset(data, small=small)
    with _opened(way, found, workers) as epoch:
        held = _warm_up(epoch, found)
        seconds, processor = [], []
        for number in range(1, epochs + 1):
            start, before = time.perf_counter(), cpu_seconds()
            samples = sum(len(y) for _, y in epoch(number))
            seconds.append(time.perf_counter() - start)
            processor.append(cpu_seconds() - before)
            _all_there(samples, found)
        held = max(held, held_bytes())
    rate = found.samples / statistics.median(seconds)
    return {
        "samples_per_second": rate,
        "bytes_per_second": rate * found.bytes_per_sample,
        "cpu_seconds_per_epoch": statistics.median(processor),
        "peak_bytes": float(held),
    }


def elsewhere(interpreter: str, way: str, data: str, **arguments: Any) -> dict[str, float]:
    """:func:`measure` by another Python, for a library that does not live beside the others.

    ``interpreter`` names an environment variable; where it is not set, this Python does it.
    """
    python = os.environ.get(interpreter)
    if not python:
        return measure(way, data, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        call = {"function": f"{__name__}:measure", "arguments": {"way": way, "data": data, **arguments}}
        asked.write_text(json.dumps(call))
        command = [python, "-m", "benchmarks.worker", str(asked), str(answer)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(answer.read_text())
    if "error" in told:
        raise RuntimeError(told["error"])
    metrics: dict[str, float] = told["metrics"]
    return metrics


def checked(way: str, data: str, workers: int, epochs: int = 2) -> None:
    """Load small epochs and compare every sample with what was written; raises ``ValueError`` on the first fault."""
    found = dataset(data, small=True)
    orders = []
    with _opened(way, found, workers) as epoch:
        for number in range(epochs):
            order: list[int] = []
            for x, y in epoch(number):
                order += found.numbers_of(x, y)
            if sorted(order) != list(range(found.samples)):
                missing = sorted(set(range(found.samples)) - set(order))
                raise ValueError(f"{way}: {len(order)} of {found.samples} samples, without {missing[:5]}.")
            orders.append(order)
    for order in orders:
        if order == sorted(order):
            raise ValueError(f"{way}: the epoch is not shuffled.")


def cpu_seconds() -> float:
    """Of this process, its living descendants, and those it has waited for."""
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    total = own.user + own.system + own.children_user + own.children_system
    for process in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def held_bytes() -> int:
    """Memory of this process and its descendants that is not a cached file: anonymous, and shared between them once."""
    total = 0
    for process in [os.getpid(), *descendants(os.getpid())]:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        rows = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
        total += sum(int(rows[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
    return total


def _opened(way: str, data: Data, workers: int) -> AbstractContextManager[Batches]:
    module, _, name = way.rpartition(".")
    opened: AbstractContextManager[Batches] = getattr(importlib.import_module(module), name)(data, workers)
    return opened


def _warm_up(epoch: Batches, data: Data) -> int:
    every = max(data.samples // data.batch // _LOOKS, 1)
    samples, held = 0, 0
    for number, (_, y) in enumerate(epoch(0)):
        samples += len(y)
        if number % every == 0:
            held = max(held, held_bytes())
    _all_there(samples, data)
    return held


def _all_there(samples: int, data: Data) -> None:
    if samples != data.samples:
        raise ValueError(f"{samples} samples came in an epoch of {data.samples}.")
