"""Measures one setting of a DataLoader for a moment, in the process that calls.

Batches are so short that several of them are loaded in the time there is. They are not copied to pinned memory.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_speedkit.data.loading.batch_task import message_of
from lightning_speedkit.data.settings.loader_orders import EndlessOrder
from lightning_speedkit.data.settings.loader_settings import LoaderTrial

__all__ = ["LoaderJob", "batches_per_second", "bytes_of", "error_text", "measure_setting", "with_short_batches"]

_PROBES = 4  # samples, of which the fastest says how many fit in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderJob:
    """What a loader loads, as far as its speed depends on it. No ``batch_size``: the dataset gives whole batches."""

    dataset: Any
    batch_size: int | None
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    start_method: str | None = None
    shuffle: bool = True


def with_short_batches(job: LoaderJob, seconds: float) -> LoaderJob:
    """The job with batches of so few samples that several of them are loaded in that time."""
    if job.batch_size is None:
        return job
    single = dataclasses.replace(job, batch_size=1)
    samples = iter(_loader(single, 0, 0, seed=0))
    times: list[float] = []
    try:
        next(samples)  # opens files
        begin = time.perf_counter()
        while not times or (len(times) < _PROBES and time.perf_counter() - begin < seconds):
            start = time.perf_counter()
            next(samples)
            times.append(time.perf_counter() - start)
    except Exception:
        return single  # the first trial reads the same samples, and tells what is wrong
    fitting = seconds / 4 / max(min(times), 1e-9)
    return dataclasses.replace(job, batch_size=min(job.batch_size, max(1, int(fitting))))


def measure_setting(job: LoaderJob, workers: int, prefetch: int, *, seconds: float, seed: int) -> LoaderTrial:
    """The trial of so many workers; a failure is a trial too."""
    factor = prefetch if workers else None
    iterator: Any = None
    loader: DataLoader[Any] | None = None
    try:
        start = time.perf_counter()
        loader = _loader(job, workers, prefetch, seed)
        iterator = iter(loader)
        size = bytes_of(next(iterator))
        seconds_start = time.perf_counter() - start
        rate = batches_per_second(iterator, max(workers, 1), seconds)
        return LoaderTrial(
            num_workers=workers,
            prefetch_factor=factor,
            samples_per_second=rate * (job.batch_size or 1),
            seconds_start=seconds_start,
            batch_bytes=size,
            worker_bytes=max((_private_bytes(child.pid) for child in multiprocessing.active_children()), default=0),
        )
    except Exception as error:
        to_try = "" if workers or loader is None else _to_try(job, loader)
        return LoaderTrial(num_workers=workers, prefetch_factor=factor, failure=error_text(error), to_try=to_try)
    finally:
        del iterator  # ends the workers


def batches_per_second(iterator: Iterator[Any], together: int, seconds: float) -> float:
    """The steady rate, in whole rounds of the batches that workers load side by side, since these arrive in one go."""
    for _ in range(together):
        next(iterator)
    count, start = 0, time.perf_counter()
    while True:
        for _ in range(together):
            next(iterator)
        count += together
        elapsed = time.perf_counter() - start
        if elapsed >= seconds or (count > together and elapsed >= 2 * seconds):
            return count / elapsed


def bytes_of(batch: Any) -> int:
    """The bytes of all tensors, arrays and byte strings in a batch, however nested.

    >>> bytes_of({"image": torch.zeros(2, 3), "names": ["a", b"bc"]})
    26
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.nbytes)
    if isinstance(batch, (bytes, bytearray)):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(map(bytes_of, batch.values()))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return sum(map(bytes_of, batch))
    if dataclasses.is_dataclass(batch):
        return sum(bytes_of(getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return 0


def error_text(error: BaseException) -> str:
    """The error in one line, with the place it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    message = message_of(error).strip().splitlines()
    # what a worker raised comes as the text of its traceback, whose last line has the error
    return f"{type(error).__name__}: {message[-1] if message else 'no message'}{place}"


def _to_try(job: LoaderJob, loader: DataLoader[Any]) -> str:
    """What fails in the batch that was asked for last, as Python, from loading its samples one by one."""
    order: Any = loader.sampler if job.batch_size is None else loader.batch_sampler
    for index in order.last:
        try:
            job.dataset[index]
        except Exception:
            return f"dataset[{index}]"
    collate = "collate_fn" if job.collate_fn else "default_collate"
    return f"{collate}([dataset[i] for i in {order.last}])" if job.batch_size else ""


def _loader(job: LoaderJob, workers: int, prefetch: int, seed: int) -> DataLoader[Any]:
    order = EndlessOrder(len(job.dataset), job.batch_size, job.shuffle, seed)
    places: dict[str, Any] = {"batch_sampler": order} if job.batch_size else {"sampler": order, "batch_size": None}
    return DataLoader(
        job.dataset,
        num_workers=workers,
        collate_fn=job.collate_fn,
        worker_init_fn=job.worker_init_fn if workers else None,
        multiprocessing_context=job.start_method if workers else None,
        prefetch_factor=prefetch if workers else None,
        generator=torch.Generator().manual_seed(seed),
        **places,
    )


def _private_bytes(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
