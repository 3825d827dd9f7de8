"""Gradient accumulation whose step is the step of one big batch.

What it does: a window of micro-batches gives the gradient of the mean loss over all samples, or all labels, of the
window. Lightning's own accumulation divides each loss by the factor. That is the same thing for a full window of equal
micro-batches on equal ranks, and a wrong gradient otherwise: the last, short window of an epoch comes out too small
(Lightning #19987), and a sample in a small micro-batch weighs more than one in a big one (Lightning #20350). Lightning
also cannot change the factor inside an epoch (#21534), nor resume inside a window.

When it helps: the batch that you want does not fit into memory. What it costs: where ranks are joined, the sum of one
number over them per window, and one multiplication of the gradients. On one device, nothing while the windows are
full and the micro-batches equal, and then the weights equal Lightning's own bit for bit. Counts that stay on a GPU
cost the multiplication in every window.

How: a loss is weighted by its samples, relative to the first micro-batch of its window, in its backward pass. Before
the last backward of the window, the gradients so far are scaled and the last loss is weighted so that what is
synchronised, clipped and stepped with is right already, whatever other callbacks look at it. Under float16 all this
happens to scaled losses and gradients, which is the same, since it is linear. There the gradients so far are scaled
down before a larger micro-batch comes, since a large weight would make its gradient infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure.lightning_internals import follow_windows, is_accumulating, skips_backward
from lightning_speedkit.optimize.accumulation_count import counter_of
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_refusals import check_optimizers, check_trainer, refuse_repeats
from lightning_speedkit.optimize.accumulation_rules import TrainerWindows, loss_scale_of, parameters_of, progress_of
from lightning_speedkit.optimize.accumulation_run import AccumulationRun
from lightning_speedkit.optimize.accumulation_schedule import checked_schedule
from lightning_speedkit.optimize.accumulation_window import weigh_backward, whole_number

__all__ = ["AccumulationScheduler"]

_FLOAT16 = ("16-mixed", "16-true", "transformer-engine-float16")
_STATE = "AccumulationScheduler"  # where a checkpoint holds an unfinished window


class AccumulationScheduler(Callback):
    """Accumulates gradients over micro-batches so that each step equals the step of one batch of all their samples.

    Holds for the short last window of an epoch, micro-batches of different sizes, and ranks with different numbers
    of samples; clipping, other callbacks and the optimizer see the true gradient. The loss of a micro-batch has to be
    the mean over what ``count`` counts. During ``fit``, ``trainer.accumulate_grad_batches`` is the factor,
    ``trainer.estimated_stepping_batches`` the true number of steps, and the ``frequency`` of a learning-rate schedule
    by step counts optimizer steps. A stop that is asked for inside a window waits for its end.

    A checkpoint that is saved inside a window holds its gradients, once, however many ranks there are.

    Where the samples of a batch cannot be told from its tensors, override :meth:`count_samples`.

    Args:
        schedule: The number of micro-batches per step, or ``{start: number}`` where starts count from 0. It is 1
            before the first start.
        unit: What starts count: ``"epoch"``, or ``"step"`` for optimizer steps.
        count: What a micro-batch weighs: ``"samples"``, ``"labels"`` (those that are not ``ignore_index``),
            ``"shifted-labels"`` (the same without the first of each row, for a causal language model), ``"batches"``
            (all alike), a function of the batch, or its path ``"module:function"``.
        target_batch: In place of a schedule: a window ends with the micro-batch that brings its samples or labels,
            over all ranks, to this number, or to that of ``{start: number}``.
        labels: Where a batch holds its labels: a key, an index, or a path of these such as ``"targets.labels"``.
        ignore_index: The label that the loss leaves out.
        log_loss: The name to log the mean loss of each window under, over all its samples and ranks.

    Raises:
        ValueError: An argument is not allowed; or, during ``fit``, the samples of a batch cannot be told.
        TypeError: A start or number is no whole number; or, during ``fit``, the batch is counted as none.
        MisconfigurationException: At ``fit``: manual optimization, an optimizer that evaluates its closure several
            times (LBFGS, SAM), a ``training_step`` that takes ``dataloader_iter``, a second callback or Trainer
            argument that sets the factor, a strategy other than one device, DDP and ModelParallelStrategy, or a
            checkpoint of another number of ranks inside a window.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> short = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 0, "barebones": True}
        >>> trainer = Trainer(callbacks=AccumulationScheduler({0: 1, 1: 4}), accelerator="cpu", **short)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step  # 6 steps of one batch, then one of 4 batches and one of 2
        8
    """

    def __init__(
        self,
        schedule: int | dict[int, int] = 1,
        unit: str = "epoch",
        count: str | Callable[[Any], int | Tensor] = "samples",
        target_batch: int | dict[int, int] | None = None,
        labels: str | int = "labels",
        ignore_index: int = -100,
        log_loss: str | None = None,
    ) -> None:
        super().__init__()
        self._plan = WindowPlan(schedule, target_batch, unit)
        if target_batch is not None and count == "batches":
            raise ValueError(
                f"target_batch={target_batch!r} and count='batches' both say how long a window is. Keep one."
            )
        self.schedule = checked_schedule(schedule)
        self.unit = unit
        self.count = count
        self.target_batch = target_batch
        self.log_loss = log_loss
        self._counter = counter_of(count, labels, ignore_index)
        self._run = AccumulationRun(self._plan, DataRanks())
        self._found: int | None = None  # the Trainer's own factor, while ours is set
        self._stop_following: Callable[[], None] | None = None
        self._had_backward = False  # the micro-batch in progress
        self._resumed: Mapping[str, Any] | None = None
        self._lost = False  # the run resumed inside a window, without its gradients
        self._resumed_at = 0  # the batch of the epoch that the run resumes at
        self._told: set[str] = set()

    def count_samples(self, batch: Any) -> int | Tensor:
        """The number of samples in a batch, or of what ``count`` counts, unless overridden.

        Return a whole number. A tensor on a device is not read, unless there is a ``target_batch``.
        """
        return self._counter(batch)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer, pl_module, AccumulationScheduler)
            self._found, self._resumed, self._told = trainer.accumulate_grad_batches, None, set()
            if self._plan.accumulates():  # else Lightning's own windows are these
                rules = TrainerWindows(trainer, self, self._plan, lambda: self._run, self._counts_samples())
                self._stop_following = follow_windows(trainer, rules)
            self._run = AccumulationRun(self._plan, DataRanks())
            self._begin(trainer, 0)  # now: configure_optimizers may read the factor

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = checkpoint.get(_STATE)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_optimizers(trainer, self._plan.accumulates())
        self._run = AccumulationRun(self._plan, DataRanks.of(trainer), self.count == "batches")
        done = progress_of(trainer).processed
        state, self._resumed = self._resumed, None
        if state is None:  # a checkpoint without this callback: its windows were Lightning's
            position, window = done % (self._plan.factor(self._position(trainer)) or 1), None
        else:
            position, window = state["position"], state["window"]
        self._begin(trainer, done - position)
        self._lost, self._resumed_at = position > 0 and window is None, done
        if window is not None:
            ratio = loss_scale_of(trainer) / window["loss_scale"]
            self._run.restore(pl_module.named_parameters(), window, ratio)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, 0)
        self._lost, self._resumed_at = False, 0
        factor, batches = self._run.bounds.factor or 1, trainer.num_training_batches
        if factor > batches and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._warn(
                f"The accumulation factor is {factor} and an epoch has {batches} batches on each rank: each epoch ends "
                f"with a step, so a step takes {batches} batches. Use a factor of at most {batches}, or longer epochs."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        run = self._run
        if batch_idx < self._resumed_at:  # saved at the last batch of an epoch: no hook told of the new one
            self._begin(trainer, batch_idx)
            self._lost = False
        elif run.bounds.is_over_at(batch_idx):
            self._begin(trainer, run.bounds.next_start(batch_idx))
        alone = run.ranks.size == 1 and run.bounds.factor == 1 and self.log_loss is None
        run.count(1 if alone or run.alike else self._counted(batch), batch_idx, self._position(trainer))
        self._had_backward, self._resumed_at = False, 0

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if self._lost:
            self._lost = False
            self._warn(
                "The run resumes inside an accumulation window. The gradient of the window's micro-batches before the "
                "checkpoint is lost; the next step is that of the remaining ones. Save with this callback in the "
                "Trainer, or between windows."
            )
        self._run.open(self._position(trainer))

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._had_backward and self._plan.accumulates():
            refuse_repeats(trainer)
        self._had_backward = True
        run = self._run
        window = run.window or run.open(self._position(trainer))
        is_last = not is_accumulating(trainer)
        weight = run.weight(lambda: parameters_of(trainer), is_last, shrink=trainer.precision in _FLOAT16)
        weigh_backward(loss, weight)
        if is_last and run.bounds.factor is None:
            trainer.accumulate_grad_batches = window.batches  # for those who read it

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._run.window is not None:  # the last micro-batch had no loss: training_step returned None
            if getattr(trainer.precision_plugin, "scaler", None) is not None:
                self._warn_if_dropped()
            self._run.close(lambda: parameters_of(trainer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.log_loss is None:
            return
        if self._had_backward:
            self._run.add_loss(outputs["loss"].detach())
        mean = self._run.mean_loss()
        if mean is not None:
            pl_module.log(self.log_loss, mean, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        run, progress = self._run, progress_of(trainer)
        in_batch = progress.ready != progress.processed
        position = progress.processed - run.bounds.start if run.window is not None or in_batch else 0
        window: dict[str, Any] | None = None
        if position > 0 and run.window is not None and not (in_batch and self._had_backward):
            window = run.state(pl_module.named_parameters(), progress.processed, self.log_loss is not None)
            window["loss_scale"] = loss_scale_of(trainer)
        checkpoint[_STATE] = {"position": position, "window": window}

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn_if_dropped()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back(trainer)

    def _counts_samples(self) -> bool:
        own = getattr(self.count_samples, "__func__", None)
        return self.count == "samples" and own is AccumulationScheduler.count_samples

    def _position(self, trainer: pl.Trainer) -> int:
        return trainer.current_epoch if self.unit == "epoch" else trainer.global_step

    def _begin(self, trainer: pl.Trainer, start: int) -> None:
        """A new window, from this micro-batch of the epoch on."""
        self._warn_if_dropped()
        self._run.begin(start, self._position(trainer))
        factor = self._run.bounds.factor
        if factor is not None and not skips_backward(trainer):  # StochasticWeightAveraging sets it in such an epoch
            trainer.accumulate_grad_batches = factor

    def _counted(self, batch: Any) -> int | Tensor:
        try:
            samples = self.count_samples(batch)
        except ValueError as error:
            raise ValueError(
                f"{error} AccumulationScheduler weighs a batch by it. Override count_samples(batch) in a subclass, or "
                "pass count='batches' to weigh all batches alike."
            ) from error
        try:
            return whole_number(samples)
        except TypeError:
            raise TypeError(f"count_samples() has to return a whole number, and returned {samples!r}.") from None

    def _put_back(self, trainer: pl.Trainer) -> None:
        if self._found is not None:
            trainer.accumulate_grad_batches, self._found = self._found, None
        if self._stop_following is not None:
            self._stop_following()
            self._stop_following = None

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_warn(message)

    def _warn_if_dropped(self) -> None:
        if self._run.window is not None and self._run.window.batches:
            self._warn(
                "An epoch ended early, a batch was None, or under float16 the last micro-batch had no loss, inside an "
                "accumulation window: Lightning takes no step there, and the gradient of the micro-batches since the "
                "last step is lost."
            )
