"""Every private attribute of Lightning that the kit reads or writes, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_internals.py`` checks each one against a real run, so that a
Lightning that renames or changes one fails there and not in a user's training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

__all__ = [
    "WindowRules",
    "batch_on_device",
    "change_train_dataloaders",
    "epochs_done",
    "follow_windows",
    "forget_metric_attributes",
    "forget_static_graph_flush",
    "is_accumulating",
    "logs_this_step",
    "loss_divisor",
    "read_optimizers",
    "recount_batches",
    "skips_backward",
    "trial_batches",
    "uncount_step",
]


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch in progress only adds to the gradient: no optimizer step follows it.

    Right from ``on_train_batch_start`` until the end of that batch's hooks; the last batch of an epoch always steps.
    Reads ``fit_loop._should_accumulate``.
    """
    return bool(trainer.fit_loop._should_accumulate())


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether this epoch runs without backward and step, as the last one of StochasticWeightAveraging does.

    Reads ``fit_loop._skip_backward``.
    """
    return bool(trainer.fit_loop._skip_backward)


def read_optimizers(configured: Any) -> tuple[list[Optimizer], list[Any]]:
    """The optimizers and schedules in what ``configure_optimizers`` returned, in any of the forms that it may take.

    A schedule is as it was given: an object, or a dict that has it. Calls ``core.optimizer._configure_optimizers``.
    """
    optimizers, schedules, _ = _configure_optimizers([] if configured is None else configured)
    return list(optimizers), list(schedules)


def forget_static_graph_flush(strategy: DDPStrategy) -> None:
    """Let a newly wrapped model flush its first static-graph iteration again, under manual optimization.

    Lightning does this once per strategy object, and torch needs it once per wrapped model: without it, the first
    step of a second ``fit`` is not synchronised. Clears ``DDPStrategy._pl_static_graph_delay_done``.
    """
    if not hasattr(strategy, "_pl_static_graph_delay_done"):
        raise AttributeError("This version of Lightning has no DDPStrategy._pl_static_graph_delay_done.")
    strategy._pl_static_graph_delay_done = False


def forget_metric_attributes(module: pl.LightningModule) -> None:
    """Let ``module.log`` look for the names of the module's metrics again.

    Lightning finds them once and knows them by ``id()``. A copy inherits the list and has other metrics, so logging
    one of them would fail. Clears ``LightningModule._metric_attributes``.
    """
    if not hasattr(module, "_metric_attributes"):
        raise AttributeError("This version of Lightning has no LightningModule._metric_attributes.")
    module._metric_attributes = None


def change_train_dataloaders(trainer: pl.Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let ``change`` see what ``fit`` gets as training loaders, and put its answer in their place.

    ``change`` is called on every rank each time that Lightning asks for the loaders: at the start of ``fit``, when
    ``estimated_stepping_batches`` is read, and when they are reloaded. What it returns is treated as if the user had
    given it: a DataLoader made there can be made anew with a distributed sampler. Returns what undoes it.

    Sets ``dataloader`` of ``fit_loop._data_source``.
    """
    source = trainer.fit_loop._data_source
    if not callable(getattr(source, "dataloader", None)):
        raise AttributeError("This version of Lightning has no _DataLoaderSource.dataloader().")
    given = source.dataloader
    found = vars(source).get("dataloader")

    def changed() -> Any:
        return change(given())

    def undo() -> None:
        if vars(source).get("dataloader") is changed:
            del source.dataloader
            if found is not None:
                source.dataloader = found  # type: ignore[method-assign]

    source.dataloader = changed  # type: ignore[method-assign]
    return undo


def epochs_done(trainer: pl.Trainer) -> int | None:
    """How many epochs the checkpoint that is being restored counts as done, or ``None`` if it is not of a fit.

    To be called from the ``load_state_dict`` of a DataModule. Reads ``_checkpoint_connector._loaded_checkpoint``.
    """
    fit_loop = trainer._checkpoint_connector._loaded_checkpoint.get("loops", {}).get("fit_loop", {})
    done = fit_loop.get("epoch_progress", {}).get("current", {}).get("processed")
    return None if done is None else int(done)


def recount_batches(trainer: pl.Trainer, batches: int) -> None:
    """Say in the checkpoint that is being restored how many batches of the unfinished epoch were done.

    For a run that goes on with another number of ranks: its batches are larger or smaller. To be called from the
    ``load_state_dict`` of a DataModule, which Lightning restores before its loops. Changes
    ``_checkpoint_connector._loaded_checkpoint``, the copy that Lightning reads the loops from; nothing is done if the
    checkpoint is not of a fit, or says the same.
    """
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    current = progress.get("current", {})
    done = current.get("ready", batches)
    for name, value in current.items():
        if isinstance(value, int) and not isinstance(value, bool):
            current[name] = value + batches - done


def logs_this_step(trainer: pl.Trainer) -> bool:
    """Whether what is logged during the batch in progress reaches the loggers, as ``log_every_n_steps`` says.

    Reads ``_logger_connector.should_update_logs``.
    """
    return bool(trainer._logger_connector.should_update_logs)


def uncount_step(trainer: pl.Trainer) -> None:
    """Take an optimizer step that was counted off ``trainer.global_step``, and off the x-axis of the loggers.

    Changes ``fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step``, in the total and in what is
    counted since the start of the epoch, and ``fit_loop.epoch_loop._batches_that_stepped``, which Lightning advances
    after the hooks of the batch.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress.optimizer.step
    for counted in (progress.total, progress.current):
        counted.ready -= 1
        counted.completed -= 1
    loop._batches_that_stepped -= 1


class WindowRules(Protocol):
    """What :func:`follow_windows` asks about the batch in progress, or the last one between two batches."""

    counts_steps: bool  # whether the ``frequency`` of a learning-rate schedule counts optimizer steps

    def hold(self) -> bool:
        """Whether the rules hold now; if not, Lightning decides as if it had none."""

    def opens(self) -> bool:
        """Whether gradients are cleared before the backward of this batch."""

    def closes(self) -> bool:
        """Whether an optimizer step follows the backward of this batch, also where the epoch does not end."""

    def is_open(self) -> bool:
        """Whether there are gradients that no step has taken."""

    def steps_in(self, batches: int, epochs: int) -> int:
        """The optimizer steps of so many epochs of so many batches."""


def follow_windows(trainer: pl.Trainer, rules: WindowRules) -> Callable[[], None]:
    """Let ``rules`` say which batches an optimizer step is taken from. Returns what undoes it.

    Lightning asks two divisions by ``accumulate_grad_batches``, which disagree once it changes inside an epoch. Here it
    is asked nothing. Losses are not divided either; a stop that is asked for inside a window waits for its end; and
    ``estimated_stepping_batches`` is the number of steps that ``rules`` count.

    Gives the Trainer, its ``epoch_loop`` and ``automatic_optimization`` a subclass of their class, which overrides
    ``_accumulated_batches_reached``, ``_should_check_val_fx``, ``_update_learning_rates``, ``_make_zero_grad_fn`` and
    ``output_result_cls``.
    """
    loop = trainer.fit_loop.epoch_loop
    undoings = [
        _mix_in(loop, _EpochInWindows, rules),
        _mix_in(loop.automatic_optimization, _UndividedOptimization, rules),
        _mix_in(trainer, _TrainerInWindows, rules),
    ]

    def undo() -> None:
        for one in undoings:
            one()

    return undo


def _mix_in(thing: Any, mixin: type, rules: WindowRules) -> Callable[[], None]:
    found = type(thing)
    for name in vars(mixin):
        if not hasattr(found, name):
            raise AttributeError(f"This version of Lightning has no {found.__name__}.{name}.")
    names = {"__module__": found.__module__, "__qualname__": found.__qualname__, "_rules_of_windows": rules}
    mixed = type(found.__name__, (mixin, found), names)
    thing.__class__ = mixed

    def undo() -> None:
        if type(thing) is mixed:
            thing.__class__ = found

    return undo


class _EpochInWindows(_TrainingEpochLoop):
    @property
    def done(self) -> bool:
        return False if _stop_waits(self) and not self._is_training_done else super().done

    def _accumulated_batches_reached(self) -> bool:
        rules = _rules(self)
        if rules is None or self.automatic_optimization._skip_backward:  # of an epoch of StochasticWeightAveraging
            return super()._accumulated_batches_reached()
        return rules.closes()

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        if not _stop_waits(self):
            return super()._should_check_val_fx(data_fetcher)
        self.trainer.should_stop = False  # else it validates after each batch until the stop
        try:
            return super()._should_check_val_fx(data_fetcher)
        finally:
            self.trainer.should_stop = True

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        rules = _rules(self)
        found = [(config, config.frequency) for config in self.trainer.lr_scheduler_configs]
        for config, frequency in found:
            if interval == config.interval == "step" and rules is not None and rules.counts_steps:
                config.frequency = 1 if self.global_step % frequency == 0 else sys.maxsize  # Lightning counts batches
        try:
            super()._update_learning_rates(interval, update_plateau_schedulers)
        finally:
            for config, frequency in found:
                config.frequency = frequency


class _UndividedResult(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:  # noqa: ARG003
        return super().from_training_step_output(training_step_output)  # not divided


class _UndividedOptimization(_AutomaticOptimization):
    @property
    def output_result_cls(self) -> type[ClosureResult]:  # type: ignore[override]
        return super().output_result_cls if _rules(self) is None else _UndividedResult

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        rules = _rules(self)
        if rules is None:
            return super()._make_zero_grad_fn(batch_idx, optimizer)
        if not rules.opens():
            return None
        trainer, factor = self.trainer, self.trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = 1  # for which Lightning clears before each batch
        try:
            return super()._make_zero_grad_fn(batch_idx, optimizer)
        finally:
            trainer.accumulate_grad_batches = factor


class _TrainerInWindows(pl.Trainer):
    @property
    def estimated_stepping_batches(self) -> int | float:
        found = super().estimated_stepping_batches  # loads the data, which tells the number of batches
        batches, epochs, rules = self.num_training_batches, self.max_epochs, _rules(self)
        if rules is None or epochs is None or epochs == -1 or not isinstance(batches, int):
            return found
        steps = rules.steps_in(batches, max(epochs, 1))
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


def _stop_waits(loop: _TrainingEpochLoop) -> bool:
    rules = _rules(loop) if loop.trainer.should_stop else None
    return rules is not None and rules.is_open()


def _rules(thing: Any) -> WindowRules | None:
    rules: WindowRules = thing._rules_of_windows
    return rules if rules.hold() else None


@contextmanager
def trial_batches(trainer: pl.Trainer) -> Iterator[Iterable[Any]]:
    """The training batches, from loaders that are made anew for this alone; can be iterated again and again.

    Afterwards ``fit`` is where it was: if it had no loaders yet, it will ask for them as if nothing had happened. For
    ``on_fit_start``, on all ranks. Lets ``fit_loop.setup_data`` set its private ``_combined_loader`` and
    ``_data_fetcher``, and puts back what they were.
    """
    loop = trainer.fit_loop
    names = ("_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", "max_batches")
    found = {name: getattr(loop, name) for name in names}
    interval = trainer.val_check_batch
    loop._combined_loader = None
    try:
        loop.setup_data()
        loader = loop._combined_loader
        yield _BatchesAlone(() if loader is None else loader, loop.max_batches)
    finally:
        if loop._data_fetcher is not None and loop._data_fetcher is not found["_data_fetcher"]:
            loop._data_fetcher.teardown()  # ends its workers
        for name, value in found.items():
            setattr(loop, name, value)
        trainer.val_check_batch = interval


class _BatchesAlone:
    """The batches of an epoch of a CombinedLoader, without their numbers."""

    def __init__(self, loader: Iterable[Any], most: float) -> None:
        self.loader, self.most = loader, most

    def __iter__(self) -> Iterator[Any]:
        most = None if self.most == float("inf") else int(self.most)
        return (batch for batch, *_ in islice(self.loader, most))


def batch_on_device(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch of a loader as ``training_step`` gets it: after the precision's and the user's hooks, on the device.

    Calls ``LightningModule._on_before_batch_transfer``.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def loss_divisor(trainer: pl.Trainer) -> float:
    """What the loss of the batch in progress was divided by before its backward: the accumulation factor, or 1.

    It is 1 under :func:`follow_windows`, whatever the factor. Asks
    ``fit_loop.epoch_loop.automatic_optimization.output_result_cls``.
    """
    factor = trainer.accumulate_grad_batches
    if factor == 1:
        return 1.0
    result = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
    divided = result.from_training_step_output(torch.ones((), dtype=torch.float64, device="cpu"), factor).closure_loss
    assert divided is not None
    return 1 / divided.item()
