"""Settings for torch's DataLoader, measured on the user's own dataset in a few seconds.

When it helps: how many workers are best depends on the samples, the transforms, the cores and the disk, and it is often
not the number that rules of thumb say: for samples that cost no Python work each worker makes loading slower, since a
batch has to travel between processes; for decoding, each core counts.

What it costs: ``seconds`` of time, in another process; nothing of the caller's is changed, and the dataset is read in
that other process only. Loading is measured alone, without a model beside it.

Source: the cost of workers for plain tensors, pytorch/pytorch#13246 and #24984.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_speedkit.data.argument_checks import a_type, check_choice, check_seconds, checked_integer
from lightning_speedkit.data.settings.loader_settings import LoaderLimits, LoaderSettings, choose_trial
from lightning_speedkit.data.settings.loader_trials import run_trials
from lightning_speedkit.data.settings.trial_measurement import LoaderJob
from lightning_speedkit.errors import LoaderError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure import read_hardware

__all__ = ["suggest_loader"]

_SHARE = 0.5  # of the free memory, and of the free shared memory, that workers may take


def suggest_loader(
    hardware: Hardware | None = None,
    dataset: Any = None,
    *,
    batch_size: int | None = 32,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    max_workers: int | None = None,
    multiprocessing_context: str | None = None,
    shuffle: bool = True,
    loaders_on_machine: int = 1,
    seconds: float = 5.0,
    patience_seconds: float = 30.0,
) -> LoaderSettings:
    """Measure how many workers, and how much prefetching, load this dataset fastest.

    Tried are 0, 1, 2, ... workers, up to the number of cores and as far as their memory and their batches in
    ``/dev/shm`` take at most half of what is free. It ends when more workers no longer bring 5 %. Among settings that
    are as good as each other the one with the fewest workers wins; on an accelerator, one worker rather than none.

    Args:
        hardware: The machine, see :func:`~lightning_speedkit.measure.read_hardware`; None reads it.
        dataset: A map-style dataset, as the DataLoader will get it.
        batch_size: Samples per batch; None if the dataset gives whole batches.
        collate_fn: As the DataLoader will get it.
        worker_init_fn: As the DataLoader will get it.
        max_workers: No more than these; by default the number of cores.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None is the default of Python.
        shuffle: Whether samples are read in random order.
        loaders_on_machine: How many such loaders share cores and memory, for example one on each rank.
        seconds: About how long to measure. A trial that has begun is finished, and two workers are always tried.
        patience_seconds: The longest wait for one trial, the start of its workers included.

    Raises:
        TypeError: The dataset is an IterableDataset, or has no length; or an argument of the wrong type.
        ValueError: The dataset is empty, or an argument is out of range.
        LoaderError: No sample could be loaded.

    >>> import torch
    >>> dataset = torch.utils.data.TensorDataset(torch.zeros(64, 8))
    >>> settings = suggest_loader(None, dataset, max_workers=0, seconds=0.1)
    >>> torch.utils.data.DataLoader(dataset, batch_size=32, **settings.arguments()).num_workers
    0
    """
    if hardware is not None and not isinstance(hardware, Hardware):
        raise TypeError(f"hardware must be a Hardware or None, got {a_type(hardware)}; {_hint(hardware)}.")
    _check_dataset(dataset)
    check_choice("multiprocessing_context", multiprocessing_context, (None, *get_all_start_methods()))
    check_seconds("seconds", seconds)
    check_seconds("patience_seconds", patience_seconds)
    hardware = hardware or read_hardware()
    limits = _limits(hardware, max_workers, checked_integer("loaders_on_machine", loaders_on_machine, 1))
    job = LoaderJob(
        dataset=dataset,
        batch_size=None if batch_size is None else checked_integer("batch_size", batch_size, 1),
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        start_method=multiprocessing_context,
        shuffle=shuffle,
    )
    trials = run_trials(job, limits, seconds=seconds, patience=patience_seconds)
    if trials[0].failure:
        raise LoaderError(
            f"No batch of {type(dataset).__name__} could be loaded to measure it: {trials[0].failure}. Try "
            f"{trials[0].to_try or 'dataset[0]'} by hand and see what happens; a dataset that cannot be read by a "
            f"worker needs num_workers=0."
        )
    chosen, reason = choose_trial(trials, prefer_workers=hardware.accelerator != "cpu")
    return LoaderSettings(
        num_workers=chosen.num_workers,
        prefetch_factor=chosen.prefetch_factor,
        pin_memory=hardware.accelerator == "cuda",
        # a worker that lives on would not see what set_epoch changes in the dataset of the training process
        persistent_workers=chosen.num_workers > 0 and not hasattr(dataset, "set_epoch"),
        multiprocessing_context=multiprocessing_context if chosen.num_workers else None,
        trials=tuple(trials),
        reason=reason,
    )


def _limits(hardware: Hardware, max_workers: int | None, loaders: int) -> LoaderLimits:
    """What one of so many loaders may take."""
    max_workers = None if max_workers is None else checked_integer("max_workers", max_workers, 0)
    return LoaderLimits(
        max_workers=hardware.cpu_count // loaders if max_workers is None else max_workers,
        memory_bytes=_share_of(_free_memory_bytes(hardware), loaders),
        shared_bytes=_share_of(_free_shared_bytes(), loaders),
    )


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an IterableDataset: with more workers it gives each sample several times, "
            "unless it divides its samples by torch.utils.data.get_worker_info(), which cannot be seen from outside. "
            "Choose num_workers by hand."
        )
    if isinstance(dataset, DataLoader):
        raise TypeError("dataset must be a dataset, got a DataLoader; suggest_for(loader) measures that of a loader.")
    if not _has_samples(dataset):
        hint = "; give that of one split, such as data.dataset('train')" if hasattr(dataset, "prepare_data") else ""
        raise TypeError(f"dataset must be map-style, with __len__ and __getitem__, got {a_type(dataset)}{hint}.")
    if len(dataset) == 0:
        raise ValueError(f"{type(dataset).__name__} is empty: there is no sample to measure.")


def _hint(given: Any) -> str:
    """What is meant by what was given as the hardware."""
    if isinstance(given, DataLoader):
        return "suggest_for(loader) measures the dataset of a DataLoader"
    if _has_samples(given) and not isinstance(given, str):
        return "the dataset comes second: suggest_loader(None, dataset)"
    return "None reads it, and read_hardware() gives one"


def _has_samples(value: Any) -> bool:
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def _share_of(free: int | None, loaders: int) -> int | None:
    return None if free is None else int(free * _SHARE / loaders)


def _free_shared_bytes(folder: str = "/dev/shm") -> int | None:
    """What workers have to hand batches over; None where there is no such folder (macOS, Windows)."""
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else None


def _free_memory_bytes(
    hardware: Hardware, *, meminfo: str = "/proc/meminfo", group: str = "/sys/fs/cgroup"
) -> int | None:
    """The memory that is free, of the machine or of the container; None where nothing says so."""
    known = [hardware.memory_bytes] if hardware.memory_bytes else []
    try:
        lines = Path(meminfo).read_text().splitlines()
        known.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        pass
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            numbers = [Path(group, name).read_text().strip() for name in (most, used)]
            known.append(max(0, int(numbers[0]) - int(numbers[1])))
        except (OSError, ValueError):  # another kind of group, or "max": no limit
            continue
    return min(known) if known else None
