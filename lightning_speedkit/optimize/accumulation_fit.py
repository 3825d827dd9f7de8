"""The accumulation windows of one ``fit``: what a callback has to keep of them, and to change in the Trainer.

What it does: it leads a run from window to window as the hooks of a callback tell of its micro-batches, and gives the
backward pass of each its weight. What it costs: some microseconds of Python per micro-batch, a good part of which
Lightning's own questions would cost in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_speedkit.measure.lightning_internals import skips_backward
from lightning_speedkit.measure.lightning_windows import follow_windows, weigh_losses
from lightning_speedkit.optimize.accumulation_count import checked_count
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_refusals import refuse_repeats
from lightning_speedkit.optimize.accumulation_rules import TrainerWindows, loss_scale_of, parameters_of, progress_of
from lightning_speedkit.optimize.accumulation_run import AccumulationRun
from lightning_speedkit.optimize.accumulation_warnings import WindowWarnings

__all__ = ["AccumulationFit", "place_in_window"]

_FLOAT16 = ("16-mixed", "16-true", "transformer-engine-float16")


def place_in_window(
    trainer: pl.Trainer, run: AccumulationRun, module: pl.LightningModule, with_loss: bool
) -> dict[str, Any]:
    """Where a run is in its window, and the window if it is open; for a checkpoint, on all ranks."""
    progress = progress_of(trainer)
    # else a callback saves as the batch starts, before this one was told of it: it is still between two batches
    in_batch = progress.ready != progress.processed and run.number == progress.ready - 1
    position = progress.processed - run.bounds.start if run.window is not None or in_batch else 0
    window: dict[str, Any] | None = None
    if position > 0 and run.window is not None and not (in_batch and run.had_backward):
        window = run.state(module.named_parameters(), progress.processed, with_loss)
        window["loss_scale"] = loss_scale_of(trainer)
    return {"position": position, "window": window}


class AccumulationFit:
    """The windows of one ``fit``. The Trainer follows them from now on, until :meth:`put_back`.

    Args:
        trainer: The Trainer.
        callback: The callback that tells of each hook, and has to be among those of the Trainer.
        plan: How long windows are.
        counts_samples: Whether windows count samples, so that the loader's batch size tells how many steps there are.
    """

    def __init__(self, trainer: pl.Trainer, callback: Callback, plan: WindowPlan, counts_samples: bool) -> None:
        self.run = AccumulationRun(plan, DataRanks())
        self._trainer = trainer
        self._callback = callback
        self._plan = plan
        self._warnings = WindowWarnings()
        self._found = trainer.accumulate_grad_batches
        self._rules = TrainerWindows(trainer, callback, plan, self.run, counts_samples, self.start_batch, self.open)
        self._accumulates = plan.accumulates()  # else Lightning's own windows are these
        self._undo = [follow_windows(trainer, self._rules)] if self._accumulates else []
        self._weighs = False  # whether losses are weighted
        self._count: Callable[[Any], int | Tensor] | None = None
        self._with_loss = False
        self._shrinks = False  # float16: weights are kept below 1
        self._lost = False  # the run resumed inside a window, without its gradients
        self._resumed_at = 0  # the batch of the epoch that the run resumes at
        self._begin(0)  # now: configure_optimizers may read the factor

    def start(
        self,
        module: pl.LightningModule,
        state: Mapping[str, Any] | None,
        count: Callable[[Any], int | Tensor] | None,
        with_loss: bool,
    ) -> None:
        """Training starts, or goes on.

        Args:
            module: What is trained.
            state: What :func:`place_in_window` said, if it goes on.
            count: What counts a micro-batch; ``None`` if every one counts 1.
            with_loss: The mean loss of each window is asked for.
        """
        trainer = self._trainer
        self.run = self._rules.run = AccumulationRun(self._plan, DataRanks.of(trainer), alike=count is None)
        self._count, self._with_loss = count, with_loss
        self._shrinks = trainer.precision in _FLOAT16
        if not self._weighs:  # training may start more than once in a fit
            self._weighs = True
            self._undo.append(weigh_losses(trainer, self._weight))
        done = progress_of(trainer).processed
        if state is None:  # a checkpoint without this callback: its windows were Lightning's
            position, window = done % (self._plan.factor(self.position()) or 1), None
        else:
            position, window = state["position"], state["window"]
        self._begin(done - position)
        self._lost, self._resumed_at = position > 0 and window is None, done
        if window is not None:
            self.run.restore(module.named_parameters(), window, loss_scale_of(trainer) / window["loss_scale"])

    def start_epoch(self) -> None:
        """The first window of an epoch."""
        self._begin(0)
        self._lost, self._resumed_at = False, 0
        factor, batches = self.run.bounds.factor or 1, self._trainer.num_training_batches
        if factor > batches and not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warnings.of_long_windows(factor, batches)

    def needs_hooks(self) -> tuple[str, ...]:
        """The hooks ``on_train_batch_start`` and ``on_before_zero_grad``, where Lightning's loop does not tell of them.

        It comes to the loop after the first hook: too late only where the end of a window follows from the batch.
        """
        if not self._accumulates:
            return "on_train_batch_start", "on_before_zero_grad"
        return () if self._plan.is_steady() else ("on_train_batch_start",)

    def start_batch(self, number: int, batch: Any) -> None:
        """A micro-batch of this number in the epoch comes."""
        run = self.run
        bounds = run.bounds
        if number < self._resumed_at:  # saved at the last batch of an epoch: no hook told of the new one
            self._begin(number)
            self._lost = False
        elif bounds.is_over_at(number):
            self._begin(bounds.next_start(number))
        self._resumed_at = 0
        samples: int | Tensor = 1
        if self._count is not None and (bounds.factor != 1 or self._with_loss or run.ranks.size > 1):
            samples = checked_count(self._count, batch)
        run.count(samples, number, self.position() if bounds.factor is None else 0)
        self._rules.settle()
        if bounds.factor is None and not (self._rules.accumulates or bounds.is_last(number) or bounds.start):
            self._warn_of_short_epoch()

    def open(self) -> None:
        """Gradients are cleared."""
        if self._lost:
            self._lost = False
            self._warnings.of_lost_gradients()
        self.run.open(self.position())

    def close(self) -> None:
        """An optimizer step comes: scale the gradients if no loss did, since the last micro-batch had none."""
        if self.run.window is not None:
            if getattr(self._trainer.precision_plugin, "scaler", None) is not None:
                self.warn_if_dropped()
            self.run.close(self._parameters)

    def position(self) -> int:
        """The epoch or step, as the plan counts."""
        return self._trainer.current_epoch if self._plan.unit == "epoch" else self._trainer.global_step

    def warn_if_dropped(self) -> None:
        """Warn if gradients were collected that no step has taken."""
        if self.run.window is not None and self.run.window.batches:
            self._warnings.of_dropped_gradients()

    def put_back(self) -> None:
        """Leave the Trainer as it was found."""
        self._trainer.accumulate_grad_batches = self._found
        for undo in reversed(self._undo):
            undo()

    def _begin(self, start: int) -> None:
        """A new window, from this micro-batch of the epoch on."""
        self.warn_if_dropped()
        self._rules.unsettle()
        self.run.begin(start, self.position())
        factor = self.run.bounds.factor
        if factor is not None and not skips_backward(self._trainer):  # StochasticWeightAveraging sets it in that epoch
            self._trainer.accumulate_grad_batches = factor

    def _warn_of_short_epoch(self) -> None:
        """The whole epoch has not reached the target."""
        if not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warnings.of_long_targets(self._plan.looked_up(self.position()), self.run.collected)

    def _weight(self) -> float | Tensor:
        """What the backward of the micro-batch in progress is multiplied by."""
        run, trainer = self.run, self._trainer
        if self._callback not in trainer.callbacks:  # type: ignore[attr-defined]  # a finder put it aside
            return 1.0
        if run.had_backward and self._accumulates:
            refuse_repeats(trainer)
        window = run.window or run.open(self.position())
        is_last = not self._rules.accumulates
        weight = run.weight(self._parameters, is_last, self._shrinks)
        if is_last and run.bounds.factor is None:
            trainer.accumulate_grad_batches = window.batches  # for those who read it
        return weight

    def _parameters(self) -> Any:
        return parameters_of(self._trainer)
