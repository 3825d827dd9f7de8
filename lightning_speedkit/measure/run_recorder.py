"""Records where the time of a training run goes: waiting for data, computing, or something else.

It helps to decide what to speed up, and to prove that it became faster. It costs a few marks per step: on a CPU reads
of the host's clock, on a CUDA device recorded events, and never a wait for the device before training ends. Data wait
on a CUDA device is the device's: a batch that was loaded while earlier work was still queued cost nothing.

Source: the split follows the phases that PyTorch Lightning announces to its profiler; that synchronizing in every step
distorts what is measured is the experience of TraceML and others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_speedkit.facts import Hardware, RunFacts, write_run
from lightning_speedkit.measure.clocks import HostClock, clock_for
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.lightning_internals import skips_backward
from lightning_speedkit.measure.profiler_tap import Listener, ProfilerTap
from lightning_speedkit.measure.samples import count_samples
from lightning_speedkit.measure.step_timer import StepTimer
from lightning_speedkit.measure.versions import read_versions

__all__ = ["RunRecorder"]

_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
_RUN = "run_training_batch"
_SAVE = "save_checkpoint"


class RunRecorder(Callback):
    """Measures the steady training steps of a ``fit`` and keeps the result as :attr:`run`.

    Sanity check, validation, saving of checkpoints and the first steps of each epoch are kept apart from the steps.
    Each process measures itself; rank 0 writes the file. Training is not changed in any way.

    Args:
        warmup_steps: So many steps at the start of each epoch are not counted: they pay for starting workers,
            compiling and choosing kernels. 0 counts every step.
        path: A JSON file for the result, written when the ``fit`` ends, also by an exception; an existing file is
            replaced. ``None`` writes nothing. ``fast_dev_run`` writes nothing either.

    Raises:
        ValueError: ``warmup_steps`` is negative.
        TypeError: ``warmup_steps`` is not a whole number, or ``path`` is not a path.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> recorder = RunRecorder(warmup_steps=2)
    >>> trainer = Trainer(
    ...     max_epochs=1, limit_train_batches=6, limit_val_batches=0, accelerator="cpu", callbacks=[recorder],
    ...     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ... )
    >>> trainer.fit(BoringModel())
    >>> recorder.run.train.steps
    4
    """

    def __init__(self, warmup_steps: int = 3, path: str | None = None) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int):
            raise TypeError(f"warmup_steps={warmup_steps!r} must be a whole number, 0 or more.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more.")
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path={path!r} must be a path as a string, or None.")
        self.warmup_steps = warmup_steps
        self.path = path
        self._host = HostClock()
        self._timer: StepTimer | None = None  # while training
        self._run: RunFacts | None = None
        self._trainer: Trainer | None = None
        self._hardware = Hardware(accelerator="cpu", device_name="")
        self._listener: Listener = {}
        self._reset_counts()

    @property
    def run(self) -> RunFacts:
        """The facts of the last ``fit``, or of the present one so far.

        Raises:
            RuntimeError: No ``fit`` has started training with this callback in this process. A strategy that starts
                processes by spawn or fork trains there and leaves the facts in the file only.
        """
        if self._timer is not None and self._trainer is not None:
            return self._facts(self._trainer, self._timer, "running")
        if self._run is None:
            where = "give RunRecorder a path" if self.path is None else f"they are in {str(self.path)!r}"
            raise RuntimeError(
                "RunRecorder has nothing yet in this process: it records from the start of training in Trainer.fit. "
                f"If the strategy started processes by 'spawn' or 'fork', the facts stayed there: {where}, and read "
                "them with lightning_speedkit.facts.read_run."
            )
        return self._run

    def _reset_counts(self) -> None:
        self._published = False
        self._factor = 1
        self._steps_taken: int | None = None  # once epochs no longer step
        self._epochs = self._first_step = 0
        self._seconds_validation = self._seconds_checkpoint = 0.0
        self._started = self._validation_started = self._save_started = 0.0

    def _facts(self, trainer: Trainer, timer: StepTimer, outcome: str) -> RunFacts:
        return RunFacts(
            hardware=self._hardware,
            train=timer.timing(),
            epochs=self._epochs,
            optimizer_steps=(trainer.global_step if self._steps_taken is None else self._steps_taken)
            - self._first_step,
            seconds_fit=self._host.mark() - self._started,
            seconds_warmup=timer.seconds_warmup,
            seconds_validation=self._seconds_validation,
            seconds_checkpoint=self._seconds_checkpoint,
            outcome=outcome,
            precision=str(trainer.precision),
            strategy=type(trainer.strategy).__name__,
            world_size=trainer.world_size,
            accumulate_grad_batches=self._factor,
            versions=read_versions(),
        )

    def _start(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        self._hardware = read_hardware(device.type if device.type in ("cuda", "mps", "xpu") else "cpu")
        timer = StepTimer(clock_for(device), self.warmup_steps)
        self._reset_counts()
        self._run, self._timer, self._trainer = None, timer, trainer
        transfer = f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device"
        self._listener = {
            _FETCH: (timer.fetch_started, timer.fetch_stopped),
            transfer: (_nothing, timer.batch_ready),
            _RUN: (timer.compute_started, timer.compute_stopped),
            _SAVE: (self._save_starts, self._save_stops),
        }
        ProfilerTap.attach(trainer, self._listener)
        self._first_step, self._factor = trainer.global_step, trainer.accumulate_grad_batches
        self._started = self._host.mark()

    def _finish(self, trainer: Trainer, outcome: str) -> None:
        ProfilerTap.detach(trainer, self._listener)
        self._listener = {}
        timer, self._timer, self._trainer = self._timer, None, None
        if timer is None:
            return
        try:
            timer.finish()
        except RuntimeError:  # the device itself failed: what it has not finished cannot be measured
            timer.drop_unfinished()
        self._run = self._facts(trainer, timer, outcome)

    def _save_starts(self) -> None:
        self._save_started = self._host.mark()
        if self._timer is not None:
            self._timer.paused()

    def _save_stops(self) -> None:
        self._seconds_checkpoint += self._host.mark() - self._save_started
        if self._timer is not None:
            self._timer.resumed()

    def _publish(self, trainer: Trainer) -> None:
        if self.path is None or self._run is None or self._published:
            return
        self._published = True
        if not trainer.is_global_zero or _fast_dev_run(trainer):
            return
        try:
            write_run(self._run, self.path)
        except OSError as error:  # the trained model is worth more than its timing
            rank_zero_warn(f"RunRecorder could not write {self.path}: {error}. The facts are in RunRecorder.run.")

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.path is not None and Path(self.path).is_dir():
            raise IsADirectoryError(f"RunRecorder(path={str(self.path)!r}) is a folder; name a file in it.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._timer is not None:
            self._timer.begin_epoch()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not skips_backward(trainer):
            self._factor = trainer.accumulate_grad_batches
        elif self._steps_taken is None:  # the last epoch of StochasticWeightAveraging has its own factor, and no step
            self._steps_taken = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timer is not None:
            self._timer.step_done(count_samples(batch))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs += 1
        if self._timer is not None:
            self._timer.interrupt()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_started = self._host.mark()
        if self._timer is not None:
            self._timer.interrupt()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._timer is not None:
            self._seconds_validation += self._host.mark() - self._validation_started

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, "completed")
        if self._run is not None and not self._run.train.steps and not _fast_dev_run(trainer):
            rank_zero_warn(
                f"RunRecorder counted no step: no epoch has more than warmup_steps={self.warmup_steps} steps. "
                "Train on more batches per epoch, or lower warmup_steps."
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer, type(exception).__name__)
        self._publish(trainer)  # what was recorded is kept, whoever failed after that

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._finish(trainer, "stopped")


def _nothing() -> None:
    pass


def _fast_dev_run(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # public, but set from outside the class
