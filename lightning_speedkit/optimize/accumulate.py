"""Gradient accumulation whose step is the step of one big batch.

What it does: a window of micro-batches gives the gradient of the mean loss over all samples, or all labels, of the
window. Lightning's own accumulation divides each loss by the factor. That is the same thing for a full window of equal
micro-batches on equal ranks, and a wrong gradient otherwise: the last, short window of an epoch comes out too small
(Lightning #19987), and a sample in a small micro-batch weighs more than one in a big one (Lightning #20350). Lightning
also cannot change the factor inside an epoch (#21534), nor resume inside a window.

When it helps: the batch that you want does not fit into memory. What it costs: where ranks are joined, the sum of one
number over them per window, and one multiplication of the gradients. On one device, nothing on gradients while the
windows are full and the micro-batches equal, and then the weights equal Lightning's own bit for bit. Counts that stay
on a GPU cost the multiplication in every window.

How: a loss is weighted by its samples, relative to the first micro-batch of its window: its backward pass starts from
that weight in place of 1, where Lightning divides every loss. Before the last backward of the window, the
gradients so far are scaled and the last loss is weighted so that what is synchronised, clipped and stepped with is
right already, whatever other callbacks look at it. Under float16 all this happens to scaled losses and gradients,
which is the same, since it is linear. There the gradients so far are scaled down before a larger micro-batch comes,
since a large weight would make its gradient infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure.lightning_hooks import BATCH_HOOKS, call_hooks, pass_over_hooks
from lightning_speedkit.optimize.accumulation_count import checked_labels, counter_of
from lightning_speedkit.optimize.accumulation_fit import AccumulationFit, place_in_window
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_refusals import check_optimizers, check_trainer
from lightning_speedkit.optimize.accumulation_run import AccumulationRun
from lightning_speedkit.optimize.accumulation_schedule import checked_schedule

__all__ = ["AccumulationScheduler"]

_STATE = "AccumulationScheduler"  # where a checkpoint holds an unfinished window
_OPTIONAL_HOOKS = tuple(name for name in BATCH_HOOKS if name != "on_before_optimizer_step")


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
        labels: Where a batch holds its labels, if they are counted: a key, an index, or a path of these such as
            ``"targets.labels"``; ``"labels"`` if not given.
        ignore_index: The label that the loss leaves out.
        log_loss: The name to log the mean loss of each window under, over all its samples and ranks.

    Raises:
        ValueError: An argument is not allowed; or, during ``fit``, the samples of a batch cannot be told.
        TypeError: A start or number is no whole number, or another argument is of the wrong kind; or, during ``fit``,
            the batch is counted as no whole number.
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
        labels: str | int | None = None,
        ignore_index: int = -100,
        log_loss: str | None = None,
    ) -> None:
        super().__init__()
        self._plan = WindowPlan(schedule, target_batch, unit)
        if target_batch is not None and count == "batches":
            raise ValueError(
                f"target_batch={target_batch!r} and count='batches' both say how long a window is. Keep one."
            )
        if log_loss is not None and not isinstance(log_loss, str):
            raise TypeError(f"log_loss={log_loss!r} must be the name to log the loss under, or None.")
        self.schedule = checked_schedule(schedule)
        self.unit = unit
        self.count = count
        self.target_batch = target_batch
        self.log_loss = log_loss
        self._counter = self._counts = counter_of(count, checked_labels(count, labels), ignore_index)
        self._run = AccumulationRun(self._plan, DataRanks())  # kept after a fit, for checkpoints that are saved then
        self._fit: AccumulationFit | None = None
        self._resumed: Mapping[str, Any] | None = None

    def count_samples(self, batch: Any) -> int | Tensor:
        """The number of samples in a batch, or of what ``count`` counts, unless overridden.

        Return a whole number. A tensor on a device is not read, unless there is a ``target_batch``.
        """
        return self._counter(batch)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer, pl_module, AccumulationScheduler)
            self._resumed = None
            is_own = getattr(self.count_samples, "__func__", None) is AccumulationScheduler.count_samples
            self._counts = self._counter if is_own else self.count_samples
            self._fit = AccumulationFit(trainer, self, self._plan, is_own and self.count == "samples")
            self._run = self._fit.run

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = checkpoint.get(_STATE)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_optimizers(trainer, self._plan.accumulates())
        fit = self._of_fit()
        needed = {*fit.needs_hooks(), *(("on_train_batch_end",) if self.log_loss is not None else ())}
        pass_over_hooks(trainer, self, AccumulationScheduler, *(name for name in _OPTIONAL_HOOKS if name not in needed))
        state, self._resumed = self._resumed, None
        fit.start(pl_module, state, None if self.count == "batches" else self._counts, self.log_loss is not None)
        self._run = fit.run

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._of_fit().start_epoch()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._fit is not None
        self._fit.start_batch(batch_idx, batch)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if not self._run.plan.accumulates():  # else the loop has told of it
            self._of_fit().open()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._of_fit().close()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.log_loss is None:
            return
        if outputs and self._run.had_backward:  # there are none for a batch that is None
            self._run.add_loss(outputs["loss"].detach())
        mean = self._run.mean_loss()
        if mean is not None:
            pl_module.log(self.log_loss, mean, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_STATE] = place_in_window(trainer, self._run, pl_module, self.log_loss is not None)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._of_fit().warn_if_dropped()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    def _of_fit(self) -> AccumulationFit:
        assert self._fit is not None
        return self._fit

    def _put_back(self) -> None:
        if self._fit is not None:
            self._fit.put_back()
            self._fit = None
        call_hooks(self, *_OPTIONAL_HOOKS)
