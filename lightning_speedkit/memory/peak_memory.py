"""The most memory that each phase of a run needed, for the logger.

What it does: reads the peaks of the device's allocator and of the process for sanity check, training, validation, test
and prediction, each on its own. When it helps: to see how much room is left, and whether validation needs more than
training. What it costs: a reading per batch on the host, on the device none. Source: the counters of torch's
allocators, set back when a phase begins, and those of the kernel, which are only read.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_speedkit.measure.memory_use import (
    read_device_memory,
    read_host_bytes,
    read_host_peak_bytes,
    reset_device_peak,
)

__all__ = ["PeakMemory", "PhasePeak"]

_PHASES = {
    "fit": ("sanity", "train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}
_NOISE = 1 << 20  # bytes; the kernel's own count wavers


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most of a phase over all its times, in bytes; ``None`` for what cannot be read here."""

    device_bytes: int | None
    host_bytes: int | None


class PeakMemory(Callback):
    """Logs ``peak_memory/train_device_bytes``, ``.../validation_host_bytes`` and so on at the end of each phase.

    :attr:`peaks` has them by the name of the phase: ``sanity``, ``train``, ``validation``, ``test``, ``predict``; those
    of a phase stay until it runs again: what ``fit`` needed is still there after ``test``.

    On the device the numbers are exact, since the allocator keeps them; its peak is set back at the start of each
    phase, also for others who read ``torch.cuda.max_memory_allocated()``. For the host the kernel keeps one peak of the
    whole process: where a phase raises it, that is exact, else it is the most that was seen after a batch.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> peaks, short = PeakMemory(), {"limit_train_batches": 2, "limit_val_batches": 1}
    >>> trainer = pl.Trainer(max_epochs=1, callbacks=peaks, accelerator="cpu", barebones=True, **short)
    >>> trainer.fit(BoringModel())
    >>> sorted(peaks.peaks)
    ['train', 'validation']
    """

    def __init__(self) -> None:
        self.peaks: dict[str, PhasePeak] = {}
        self._phase = ""
        self._resume = ""
        self._seen: int | None = None
        self._before: int | None = None
        self._warned = False

    def _begin(self, trainer: pl.Trainer, phase: str) -> None:
        self._resume = self._phase if phase != self._phase else ""
        self._note(trainer)
        self._phase = phase
        self._seen, self._before = read_host_bytes(), read_host_peak_bytes()
        reset_device_peak(trainer.strategy.root_device)

    def _end(self, trainer: pl.Trainer) -> None:
        """Of a phase: note it, log it, and go on with the one that it interrupted."""
        self._note(trainer)
        phase, self._phase = self._phase, ""
        if phase:
            self._log(trainer, phase)
        if self._resume:
            self._begin(trainer, self._resume)
            self._resume = ""

    def _note(self, trainer: pl.Trainer) -> None:
        if not self._phase:
            return
        self._look()
        memory, peak = read_device_memory(trainer.strategy.root_device), read_host_peak_bytes()
        raised = peak is not None and self._before is not None and peak > self._before + _NOISE
        host = peak if raised else self._seen
        earlier = self.peaks.get(self._phase, PhasePeak(device_bytes=None, host_bytes=None))
        self.peaks[self._phase] = PhasePeak(
            device_bytes=_most(earlier.device_bytes, None if memory is None else memory.peak_bytes),
            host_bytes=_most(earlier.host_bytes, host),
        )

    def _look(self) -> None:
        self._seen = _most(self._seen, read_host_bytes())

    def _log(self, trainer: pl.Trainer, phase: str) -> None:
        peak = self.peaks[phase]
        told = {"device_bytes": peak.device_bytes, "host_bytes": peak.host_bytes}
        metrics = {f"peak_memory/{phase}_{name}": float(size) for name, size in told.items() if size is not None}
        for logger in trainer.loggers if metrics else ():
            try:
                logger.log_metrics(metrics, step=trainer.global_step)
            except Exception as error:  # a number for people to look at is not worth a run
                if not self._warned:
                    self._warned = True
                    warnings.warn(f"PeakMemory could not log to {type(logger).__name__}: {error!r}", stacklevel=2)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._phase, self._resume, self._warned = "", "", False
        for phase in _PHASES.get(stage, ()):
            self.peaks.pop(phase, None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, "train")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer)
        if self._phase:
            self._log(trainer, self._phase)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer)
        self._phase = ""

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, "sanity" if trainer.sanity_checking else "validation")

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._look()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, "test")

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, "predict")

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._note(trainer)
        self._phase = self._resume = ""


def _most(one: int | None, other: int | None) -> int | None:
    known = [number for number in (one, other) if number is not None]
    return max(known) if known else None
