"""Gives unused memory back where a run changes from one phase to another, and where the allocator is badly fragmented.

What it does: collects garbage, empties the allocator's cache, and asks the C library to return what it keeps, between
training and validation; in training only when much of what the allocator holds is in no tensor. When it helps:
validation that needs other sizes than training and fails though it needs less; a host on which memory that was freed
long ago is missed by others. What it costs: a collection of about 0.1 s per change, and new allocations after it.
Emptying the cache in every step, as is often advised, makes each allocation wait for the device.

Source: PyTorch's notes on CUDA memory management; the GNU C library's ``malloc_trim``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_speedkit.measure.memory_use import read_device_memory, read_host_bytes
from lightning_speedkit.measure.out_of_memory import release_memory

__all__ = ["CacheRelease", "release_cache"]


def release_cache(device: torch.device, trim_host: bool = False) -> int:
    """Collect garbage and empty the allocator's cache of a device; the number of bytes that others may have now.

    Args:
        device: For the CPU only garbage is collected.
        trim_host: Whether the C library is asked to return free memory to the system. Only that of GNU can.

    >>> release_cache(torch.device("cpu"), trim_host=True) >= 0
    True
    """
    before = _held(device, trim_host)
    release_memory(device)
    if trim_host:
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
    return max(0, before - _held(device, trim_host))


class CacheRelease(Callback):
    """Releases cached memory between phases, and in training when fragmentation is over a threshold.

    :attr:`releases` counts how often, :attr:`released_bytes` how much others could have after it.

    Args:
        between_phases: Whether to do it before and after validation, and before test and prediction.
        fragmentation: In training, the part of the allocator's memory that may be in no tensor, above 0 and up to 1;
            1 never releases in training. Looked at after every ``check_every`` batches; not on a CPU.
        check_every: Batches between two looks.
        trim_host: Whether free memory of the host goes back to the system too; where the C library is GNU's.

    Raises:
        TypeError: A flag is no truth value, or a number not of its kind.
        ValueError: A number is out of its range.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> release, short = CacheRelease(), {"limit_train_batches": 2, "limit_val_batches": 1}
    >>> trainer = pl.Trainer(max_epochs=2, callbacks=release, accelerator="cpu", barebones=True, **short)
    >>> trainer.fit(BoringModel())
    >>> release.releases
    4
    """

    def __init__(
        self,
        between_phases: bool = True,
        fragmentation: float = 0.5,
        check_every: int = 100,
        trim_host: bool = False,
    ) -> None:
        for name, flag in (("between_phases", between_phases), ("trim_host", trim_host)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r} must be True or False.")
        if isinstance(fragmentation, bool) or not isinstance(fragmentation, (int, float)):
            raise TypeError(f"fragmentation={fragmentation!r} must be a number above 0, up to 1.")
        if not 0 < fragmentation <= 1:
            raise ValueError(f"fragmentation={fragmentation} must be above 0 and at most 1, which turns it off.")
        if isinstance(check_every, bool) or not isinstance(check_every, int):
            raise TypeError(f"check_every={check_every!r} must be a whole number of batches, 1 or more.")
        if check_every < 1:
            raise ValueError(f"check_every={check_every} must be 1 or more.")
        self.between_phases = between_phases
        self.fragmentation = fragmentation
        self.check_every = check_every
        self.trim_host = trim_host
        self.releases = 0
        self.released_bytes = 0

    def _release(self, trainer: pl.Trainer) -> None:
        self.released_bytes += release_cache(trainer.strategy.root_device, self.trim_host)
        self.releases += 1

    def _release_between_phases(self, trainer: pl.Trainer) -> None:
        if self.between_phases and not trainer.sanity_checking:
            self._release(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.check_every or self.fragmentation >= 1:
            return
        memory = read_device_memory(trainer.strategy.root_device)
        if memory is not None and memory.fragmented_share > self.fragmentation:
            self._release(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release_between_phases(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release_between_phases(trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release_between_phases(trainer)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release_between_phases(trainer)


def _held(device: torch.device, host: bool) -> int:
    memory = read_device_memory(device)
    return (0 if memory is None else memory.reserved_bytes) + ((read_host_bytes() or 0) if host else 0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library on Windows
        return None
    return trim
