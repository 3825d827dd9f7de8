"""Every private attribute of Lightning that says which batches an optimizer step is taken from, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_windows.py`` checks each one against a real run. What it costs:
a few comparisons per batch, which is less than the questions that Lightning asks itself in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["WindowRules", "follow_windows", "weigh_losses"]


class WindowRules(Protocol):
    """What :func:`follow_windows` asks about the batch in progress, or the last one between two batches."""

    counts_steps: bool  # whether the ``frequency`` of a learning-rate schedule counts optimizer steps
    settled: int  # the number of batches that were begun, if ``accumulates`` holds for the last of them; -1 for none
    accumulates: bool  # whether no optimizer step follows its backward

    def hold(self) -> bool:
        """Whether the rules hold now; if not, Lightning decides as if it had none."""

    def start(self, batch: int, data: Any) -> None:
        """This batch of the epoch comes to ``training_step``. Left out where the answer for it is ``settled``."""

    def opens(self) -> bool:
        """Whether gradients are cleared before the backward of this batch."""

    def open(self) -> None:
        """They will be."""

    def closes(self, batch: int) -> bool | None:
        """Whether an optimizer step follows the backward of this batch of the epoch, also where it does not end.

        ``None`` if the rules do not hold now. Asked six times per batch, but where the answer is ``settled``.
        """

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
    ``_accumulated_batches_reached``, ``_should_accumulate``, ``_should_check_val_fx``, ``_update_learning_rates``,
    ``run``, ``_make_zero_grad_fn`` and ``output_result_cls``.
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


def weigh_losses(trainer: pl.Trainer, weight: Callable[[], float | Tensor]) -> Callable[[], None]:
    """Let the backward of each loss give ``weight()`` times its gradient. Returns what undoes it.

    It is asked for after all hooks ``on_before_backward``, which see the loss as it is, with what a gradient scaler
    made of it. A number is the gradient that the backward pass starts from in place of 1, which costs no operation.
    Where a module, plugin or another callback has a ``backward`` of its own, or the weight is a tensor, the loss is
    multiplied; the gradients are the same to the bit. Gives the Trainer's precision plugin another ``backward``.
    """
    plugin: Any = trainer.precision_plugin
    module, found, before = trainer.lightning_module, vars(plugin).get("backward"), plugin.backward
    passes_on = (type(plugin).backward, type(module).backward) == (Precision.backward, pl.LightningModule.backward)
    passes_on = passes_on and found is None and "backward" not in vars(module)

    def backward(loss: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        factor = weight()
        if not isinstance(factor, float):
            loss = loss * factor.to(loss.dtype)
        elif factor != 1.0 and passes_on and type(loss) is Tensor and not loss.ndim:
            # a new one each time: autograd may keep it as the gradient of a parameter, and add to it
            options["gradient"] = torch.full((), factor, dtype=loss.dtype, device=loss.device)
        elif factor != 1.0:
            loss = loss * factor
        before(loss, *arguments, **options)

    plugin.backward = lambda loss, *arguments, **options: backward(loss, arguments, options)
    placed = plugin.backward

    def undo() -> None:
        if vars(plugin).get("backward") is placed:
            del plugin.backward
            if found is not None:
                plugin.backward = found

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
    _rules_of_windows: WindowRules

    @property
    def done(self) -> bool:
        waits = self.trainer.should_stop and _stop_waits(self)
        return False if waits and not self._is_training_done else super().done

    def _accumulated_batches_reached(self) -> bool:
        if not self.automatic_optimization._skip_backward:  # of an epoch of StochasticWeightAveraging
            closes = self._rules_of_windows.closes(self.batch_progress.current.ready - 1)
            if closes is not None:
                return closes
        return super()._accumulated_batches_reached()

    def _should_accumulate(self) -> bool:
        # Lightning's answer, without its way through properties: it is asked for six times per batch
        progress, rules = self.batch_progress, self._rules_of_windows
        ready = progress.current.ready
        if ready == rules.settled and rules.hold():
            return rules.accumulates
        is_final = progress.is_last_batch or ready == self.trainer.fit_loop.max_batches
        if not (is_final or self.automatic_optimization._skip_backward):
            closes = rules.closes(ready - 1)
            if closes is not None:
                return not closes
        return super()._should_accumulate()

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        if not (self.trainer.should_stop and _stop_waits(self)):
            return super()._should_check_val_fx(data_fetcher)
        self.trainer.should_stop = False  # else it validates after each batch until the stop
        try:
            return super()._should_check_val_fx(data_fetcher)
        finally:
            self.trainer.should_stop = True

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        if not self.trainer.lr_scheduler_configs:
            return
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
        output = training_step_output
        if isinstance(output, Tensor):
            return cls(output)
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return cls(output["loss"], extra={key: value for key, value in output.items() if key != "loss"})
        return super().from_training_step_output(output)  # None, or Lightning's message


class _UndividedOptimization(_AutomaticOptimization):
    _rules_of_windows: WindowRules

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        rules = self._rules_of_windows
        if rules.settled != self.trainer.fit_loop.epoch_loop.batch_progress.current.ready and rules.hold():
            rules.start(batch_idx, next(iter(kwargs.values())))
        return super().run(optimizer, batch_idx, kwargs)

    @property
    def output_result_cls(self) -> type[ClosureResult]:  # type: ignore[override]
        return _UndividedResult if self._rules_of_windows.hold() else super().output_result_cls

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        rules = self._rules_of_windows
        if not rules.hold():
            return super()._make_zero_grad_fn(batch_idx, optimizer)
        if not rules.opens():
            return None
        trainer, factor = self.trainer, self.trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = 1  # for which Lightning clears before each batch
        try:
            clear = super()._make_zero_grad_fn(batch_idx, optimizer)
        finally:
            trainer.accumulate_grad_batches = factor
        if clear is not None:
            rules.open()
        return clear


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
    rules = _rules(loop)
    return rules is not None and rules.is_open()


def _rules(thing: Any) -> WindowRules | None:
    rules: WindowRules = thing._rules_of_windows
    return rules if rules.hold() else None
