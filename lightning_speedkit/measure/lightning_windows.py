"""Every private attribute of Lightning that says which batches an optimizer step is taken from, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_windows.py`` checks each one against a real run. What it costs:
a few comparisons per batch, which is less than the questions that Lightning asks itself in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
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

    def opens(self) -> bool:
        """Whether gradients are cleared before the backward of this batch."""

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
    ``_make_zero_grad_fn`` and ``output_result_cls``.
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


def weigh_losses(trainer: pl.Trainer, weigh: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Let the backward of each loss start from ``weigh(loss)``. Returns what undoes it.

    It is called after all hooks ``on_before_backward``, which see the loss as it is, with what a gradient scaler made
    of it. Gives the Trainer's precision plugin another ``pre_backward``.
    """
    plugin: Any = trainer.precision_plugin
    before = plugin.pre_backward

    def pre_backward(loss: Tensor, module: pl.LightningModule) -> Tensor:
        return weigh(before(loss, module))

    plugin.pre_backward = pre_backward

    def undo() -> None:
        if vars(plugin).get("pre_backward") is pre_backward:
            del plugin.pre_backward

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
    rules = _rules(loop)
    return rules is not None and rules.is_open()


def _rules(thing: Any) -> WindowRules | None:
    rules: WindowRules = thing._rules_of_windows
    return rules if rules.hold() else None
