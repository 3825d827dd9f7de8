"""Chooses who makes the batches of a loader: threads, processes, or the training loop itself.

Copying from a map and decoding pictures release the GIL: threads. Everything else is Python code of the user, of which
nobody knows the cost or whether it runs side by side, so it is measured for a moment: in a process of its own, because
a dataset that opens a file the first time it is read must not do so in a process that is forked afterwards.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from lightning_speedkit.data.argument_checks import check_choice, checked_integer
from lightning_speedkit.data.loading.batch_builder import StoreBatches
from lightning_speedkit.data.loading.batch_task import BatchBuilder, BatchTask, seeded
from lightning_speedkit.data.loading.quiet_start import ignore_interrupts, start_quietly

__all__ = ["START_METHODS", "WORKERS", "WorkerChoice", "check_workers", "choose_workers", "cpu_count"]

WORKERS = ("auto", "threads", "processes", "inline")
START_METHODS = (None, *multiprocessing.get_all_start_methods())

_logger = logging.getLogger(__name__)
_BATCHES = 4
_LONG_ENOUGH = 0.5  # seconds: a probe stops after the batch that passes them
_PATIENCE = 60.0  # seconds until a probe is given up
_ENDING = 0.5  # seconds until one that has answered is killed
_CHEAP = 1e-3  # seconds a batch: below, sending it costs as much as making it
_SIDE_BY_SIDE = 1.5  # threads make more than so many times the batches of one


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """``kind`` is ``"threads"``, ``"processes"`` or ``"inline"``; ``reason`` says why in one sentence."""

    kind: str
    workers: int
    reason: str


def cpu_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def check_workers(workers: str, num_workers: int | None, start_method: str | None) -> None:
    """Raise unless a loader can have such workers.

    Raises:
        TypeError, ValueError: one of them is not allowed, or the first two do not agree.
    """
    check_choice("workers", workers, WORKERS)
    check_choice("start_method", start_method, START_METHODS)
    none = num_workers is not None and checked_integer("num_workers", num_workers, 0) == 0
    if none and workers in ("threads", "processes"):
        raise ValueError(f"workers={workers!r} needs num_workers of 1 or more, or None; 0 means workers='inline'.")


def choose_workers(
    builder: BatchBuilder,
    tasks: list[BatchTask],
    steps: int,
    *,
    kind: str = "auto",
    workers: int | None = None,
    start_method: str | None = None,
) -> WorkerChoice:
    """The kind and number of workers; what the caller has set is kept. ``tasks`` are the first of ``steps`` batches."""
    if kind == "inline" or (workers == 0 and kind == "auto"):
        return WorkerChoice("inline", 0, "it was asked for")
    count = workers or min(cpu_count(), _most(builder))
    if kind != "auto":
        return WorkerChoice(kind, count, "it was asked for")
    if isinstance(builder, StoreBatches):
        work = "decoding" if builder.decodes else "copying"
        return WorkerChoice("threads", count, f"{work} releases the GIL")
    choice = _measured(builder, tasks, steps, count, start_method)
    _logger.info("Batches are made by %s (%s workers): %s.", choice.kind, choice.workers, choice.reason)
    return choice


def _most(builder: BatchBuilder) -> int:
    """More workers than these are taken only if they are asked for."""
    if isinstance(builder, StoreBatches):
        return 16 if builder.decodes else 4  # a few threads reach what the memory can copy
    return 8


def _measured(
    builder: BatchBuilder, tasks: list[BatchTask], steps: int, workers: int, start_method: str | None
) -> WorkerChoice:
    probe = _probe_elsewhere(builder, tasks[:_BATCHES], start_method)
    if probe is None:
        return WorkerChoice("inline", 0, "no process can be had, or the dataset cannot be sent to one or failed in it")
    cost = f"{1e3 * probe.seconds_per_batch:.1f} ms a batch"
    if probe.seconds_per_batch * steps < _CHEAP * 100 or probe.seconds_per_batch < _CHEAP:
        return WorkerChoice("inline", 0, f"{cost} are less than sending them costs")
    if probe.draws_random_numbers:
        return WorkerChoice("processes", workers, f"{cost}, drawn from the global random state")
    kind = "threads" if probe.thread_speedup >= _SIDE_BY_SIDE else "processes"
    return WorkerChoice(kind, workers, f"{cost}, {probe.thread_speedup:.1f} times as many by two threads")


@dataclass(frozen=True, slots=True)
class _Probe:
    seconds_per_batch: float
    thread_speedup: float
    draws_random_numbers: bool


def _probe_elsewhere(builder: BatchBuilder, tasks: list[BatchTask], start_method: str | None) -> _Probe | None:
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_probe_and_send, args=(theirs, builder, tasks), daemon=True)
    try:
        start_quietly(process)
    except (pickle.PicklingError, AttributeError, TypeError, AssertionError, OSError):
        ours.close()
        return None  # not to be sent; or a daemonic process, which may start none; or a limit of the machine
    finally:
        theirs.close()
    probe: _Probe | None = None
    try:
        if ours.poll(_PATIENCE):
            probe = ours.recv()
            process.join(_ENDING)  # it ends by itself, and may have something to put in order
        return probe
    except (EOFError, OSError):
        return None
    finally:
        ours.close()
        process.kill()
        process.join()


def _probe_and_send(pipe: Connection, builder: BatchBuilder, tasks: list[BatchTask]) -> None:
    ignore_interrupts()
    torch.set_num_threads(1)
    try:
        pipe.send(_probe(builder, tasks))
    except Exception:
        pipe.send(None)  # the loader will meet the same fault, and raise it where the user sees it


def _probe(builder: BatchBuilder, tasks: list[BatchTask]) -> _Probe:
    draws, times = False, []
    for task in tasks:
        with seeded(task.key, put_back=False):
            before = _random_state()
            start = time.perf_counter()
            builder.build(task, None, "untouched")
            times.append(time.perf_counter() - start)
            draws = draws or before != _random_state()
        if sum(times) > _LONG_ENOUGH:
            break
    alone = statistics.median(times[1:] or times)  # the first opens files
    if alone < _CHEAP:
        return _Probe(alone, 1.0, draws)
    again = [tasks[i % len(times)] for i in range(max(2, min(4, int(_LONG_ENOUGH / alone))))]
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda task: builder.build(task, None, "untouched"), again))
        both = (time.perf_counter() - start) / len(again)
    return _Probe(alone, alone / both, draws)


def _random_state() -> tuple[Any, bytes, bytes]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes() + repr(state[2:]).encode(), torch.get_rng_state().numpy().tobytes()
