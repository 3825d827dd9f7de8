"""Finds memory that grows with every step, and names what keeps it.

What it does: reads the memory of the process and of the device after training steps. When one of them rises steadily,
it counts what lives in Python four times over the next 120 steps, and names what is more of it each time: the list, the
attribute, the kind of tensor. When it helps: a run that dies after hours. What it costs: three readings per step at
first, fewer later; for each count a walk over all objects of the process, and none without a suspicion.

Source: the leaks that users meet most, a list of losses with their graphs and metrics that are never reset
(geo-deep-learning #582); and what only looks like one, such as mapped files and an allocator that keeps what it has
(pytorch #62066, Lightning #5725).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from lightning_speedkit.errors import SpeedkitError
from lightning_speedkit.memory.leak_monitor_search import LeakSearch
from lightning_speedkit.memory.leak_monitor_story import Leak

__all__ = ["Leak", "LeakMonitor"]

_EVERY = 50  # steps between two values for the loggers


class LeakMonitor(Callback):
    """Warns once per ``fit`` of memory that grows with every step, on the device or on the host.

    :attr:`leaks` has what was found, each with its owner, its bytes per step and a remedy; :meth:`Leak.describe` tells
    it. Loggers get ``leak_monitor/host_bytes_per_step`` and ``.../device_bytes_per_step``. What rises and then stays
    is no leak: a warm-up, a cache that fills, an allocator that keeps its blocks, files that are mapped. Every process
    watches itself.

    Args:
        warmup_steps: So many batches at the start of a ``fit`` are not looked at.
        min_bytes_per_step: Slower growth is no leak, unless it is of a graph or of hooks.
        raise_on_leak: Whether a leak ends the run, as a test may want.
        trace_allocations: Whether a suspicion is followed by ``tracemalloc``, which names the line that allocates. It
            makes those 120 steps slow.

    Raises:
        TypeError: ``warmup_steps`` is no whole number, or another argument not of its kind.
        ValueError: A number is negative.
        SpeedkitError: A leak was found, and ``raise_on_leak`` is true.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> monitor = LeakMonitor()
    >>> trainer = pl.Trainer(max_epochs=1, callbacks=monitor, accelerator="cpu", barebones=True)
    >>> trainer.fit(BoringModel())
    >>> monitor.leaks
    []
    """

    def __init__(
        self,
        warmup_steps: int = 32,
        min_bytes_per_step: float = 256,
        raise_on_leak: bool = False,
        trace_allocations: bool = False,
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int):
            raise TypeError(f"warmup_steps={warmup_steps!r} must be a whole number of batches, 0 or more.")
        if isinstance(min_bytes_per_step, bool) or not isinstance(min_bytes_per_step, (int, float)):
            raise TypeError(f"min_bytes_per_step={min_bytes_per_step!r} must be a number of bytes, 0 or more.")
        for name, number in (("warmup_steps", warmup_steps), ("min_bytes_per_step", min_bytes_per_step)):
            if not number >= 0:
                raise ValueError(f"{name}={number} must be 0 or more.")
        for name, flag in (("raise_on_leak", raise_on_leak), ("trace_allocations", trace_allocations)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r} must be True or False.")
        self.warmup_steps = warmup_steps
        self.min_bytes_per_step = min_bytes_per_step
        self.raise_on_leak = raise_on_leak
        self.trace_allocations = trace_allocations
        self.leaks: list[Leak] = []
        self._search: LeakSearch | None = None
        self._step = 0
        self._in_new_epoch = False
        self._warned = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        self.leaks = []
        self._step, self._in_new_epoch, self._warned = 0, False, False
        self._search = LeakSearch(
            lambda: _named_objects(trainer, pl_module, self),
            trainer.strategy.root_device,
            self.warmup_steps,
            self.min_bytes_per_step,
            self.trace_allocations,
        )

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._in_new_epoch = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step += 1
        if self._search is None:
            return
        if self._in_new_epoch:  # only now has the module let go of what it gathered
            self._in_new_epoch = False
            self._tell(self._search.border(self._step), trainer)
        if self._search.wants(self._step):
            self._tell(self._search.look(self._step, trainer.num_training_batches - batch_idx - 1), trainer)
        if self._step % _EVERY == 0 and trainer.loggers:
            host, device = self._search.slopes()
            told = {"leak_monitor/host_bytes_per_step": host, "leak_monitor/device_bytes_per_step": device}
            for logger in trainer.loggers:
                self._log(logger, told, trainer.global_step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        search, self._search = self._search, None
        if search is not None:
            leak = search.border(self._step, last=True)
            search.close()
            self._tell(leak, trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._search is not None:
            self._search.close()
            self._search = None

    def _log(self, logger: Logger, told: dict[str, float], step: int) -> None:
        try:
            logger.log_metrics(told, step=step)
        except Exception as error:  # a number for people to look at is not worth a run
            if not self._warned:
                self._warned = True
                warnings.warn(f"LeakMonitor could not log to {type(logger).__name__}: {error!r}", stacklevel=2)

    def _tell(self, leak: Leak | None, trainer: pl.Trainer) -> None:
        if leak is None:
            return
        self.leaks.append(leak)
        rank = f" in process {trainer.global_rank}" if trainer.world_size > 1 else ""
        message = f"Memory leak{rank}: {leak.describe()}"
        if self.raise_on_leak:
            raise SpeedkitError(message)
        if len(self.leaks) == 1:
            warnings.warn(f"{message} LeakMonitor.leaks has this one and any further one.", stacklevel=2)


def _named_objects(trainer: pl.Trainer, pl_module: pl.LightningModule, monitor: Callback) -> Mapping[str, Any]:
    """From the module of the user to all modules of Python, in the order in which a name says most."""
    named: dict[str, Any] = {type(pl_module).__name__: pl_module}
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    named.update((type(callback).__name__, callback) for callback in callbacks if callback is not monitor)
    named.update((type(logger).__name__, logger) for logger in trainer.loggers)
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        named[type(datamodule).__name__] = datamodule
    named.update((f"optimizer {number}", optimizer) for number, optimizer in enumerate(trainer.optimizers))
    modules = sorted(sys.modules.items(), key=lambda entry: entry[0] != "__main__")
    return {**named, "trainer": trainer, **{name: module for name, module in modules if module is not None}}
