"""Batches that do not fit into memory are computed in smaller pieces, and the step stays the same.

What it does: when memory runs out, the same batch is computed again in pieces, with the same samples, weights, buffers
and random state, and its gradient is that of the whole batch. The size that fits is kept for the batches after it, and
a larger one is tried now and then.

When it helps: the largest batch that fits is not known, or changes from batch to batch (sequences, graphs, another
device), and a run must not end at step 20000. What it costs: while nothing fails, copies of the random state and of
small buffers per batch; on several ranks gradients are sent after the backward pass and not during it, since a rank
that fails there would leave the others waiting. Source: the idea is Composer's automatic microbatching; asked for
Lightning in #17393.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_speedkit.measure.host_group import HostGroup
from lightning_speedkit.measure.lightning_internals import is_accumulating
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.optimize.accumulation_count import checked_labels, counter_of
from lightning_speedkit.optimize.batch_split import samples_of, split_batch
from lightning_speedkit.optimize.micro_batch_gradients import synchronize_gradients
from lightning_speedkit.optimize.micro_batch_messages import Messages
from lightning_speedkit.optimize.micro_batch_ranks import agree
from lightning_speedkit.optimize.micro_batch_refusals import check_strategy, check_trainer, check_wrapped
from lightning_speedkit.optimize.micro_batch_retry import BatchPieces, backward_in_pieces
from lightning_speedkit.optimize.micro_batch_run import replaced
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_step import RepeatableSteps
from lightning_speedkit.optimize.micro_batch_training import StepsInPieces

__all__ = ["AutoMicroBatch", "backward_in_pieces"]


class AutoMicroBatch(OneOfAKind):
    """Computes a batch in smaller pieces when memory runs out; the step is that of the whole batch.

    Holds for memory that runs out in the forward pass, in the backward pass, in the optimizer's step and in
    validation and test steps. Accumulation, gradient scaling, clipping and other callbacks see one batch with one loss
    and one backward pass. On several ranks each one retries alone before gradients are sent, and then all take the
    smallest size.

    Override :meth:`count_samples` and :meth:`split` for batches that :func:`split_batch` cannot cut.

    Args:
        smallest: The fewest samples to compute at once; if they do not fit, the run ends with a message.
        grow_after: Try twice as many samples after so many batches in pieces; ``None`` never tries. A try that fails
            doubles the wait.
        batch_dim: The batch dimension of tensors: 0, or 1 for padded sequences that are time first.
        reduction: Whether the loss of a batch is the ``"mean"`` or the ``"sum"`` over its samples.
        step_copy_mib: Weights and optimizer state up to this size in MiB are copied before each optimizer step, so
            that one that failed half-way is undone. Larger ones are not; there such a failure ends the run.
        count: What the loss is a mean over: ``"samples"``, ``"labels"`` (those that are not ``ignore_index``),
            ``"shifted-labels"`` (without the first one of each row), ``"module:function"``, or a function of a piece.
        labels: Where the labels are in a batch, if they are counted: a key, an index, or a path such as
            ``"targets.labels"``; ``"labels"`` if not given.
        ignore_index: The label that the loss leaves out.

    Raises:
        ValueError: An argument is out of range or unknown; at the first batch: it has not what ``count`` counts.
        MisconfigurationException: At ``fit``: manual optimization, a ``training_step`` that takes
            ``dataloader_iter``, a second AutoMicroBatch, a strategy other than one device and DDP, a static graph, or
            SyncBatchNorm on several ranks.
        torch.OutOfMemoryError: During a run: the smallest piece does not fit, or the batch cannot be cut.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> callback = AutoMicroBatch()
        >>> trainer = Trainer(callbacks=callback, accelerator="cpu", max_epochs=1, barebones=True)
        >>> trainer.fit(BoringModel())
        >>> callback.micro_batch_size is None  # every batch did fit
        True
    """

    def __init__(
        self,
        smallest: int = 1,
        grow_after: int | None = 200,
        batch_dim: int = 0,
        reduction: Literal["mean", "sum"] = "mean",
        step_copy_mib: float = 32.0,
        count: str | Callable[[Any], int | Tensor] = "samples",
        labels: str | int | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
            raise ValueError(f"batch_dim={batch_dim!r} must be 0 or more: dimensions are counted from the first.")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r} is unknown; use 'mean' or 'sum'.")
        if not isinstance(step_copy_mib, int | float) or not step_copy_mib >= 0:
            raise ValueError(f"step_copy_mib={step_copy_mib!r} must be 0 or more, a number.")
        if count == "batches":
            raise ValueError("count='batches' would weigh a piece of one sample like one of ten; use 'samples'.")
        if reduction == "sum" and count != "samples":
            raise ValueError(f"reduction='sum' needs no weights, so count={count!r} would have no effect. Set one.")
        self.batch_dim = batch_dim
        self.reduction = reduction
        self.step_copy_mib = step_copy_mib
        self.count = count
        self._counter = counter_of(count, checked_labels(count, labels), ignore_index)
        self._training = MicroBatchSize(smallest, grow_after)
        self._evaluation = MicroBatchSize(smallest, grow_after)
        self._steps: StepsInPieces | None = None
        self._group: HostGroup | None = None
        self._undo = ExitStack()
        self._optimizers: list[torch.optim.Optimizer] = []  # whose step is ours
        self._optimizer_steps = RepeatableSteps(step_copy_mib * 2**20)
        self._messages = Messages(counts_samples=count == "samples" and reduction == "mean")

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples that training computes at once; ``None`` while every batch fitted."""
        return self._training.limit

    def count_samples(self, batch: Any) -> int:
        """The number of samples in a batch; :func:`samples_of`, unless overridden."""
        return samples_of(batch, self.batch_dim)

    def split(self, batch: Any, size: int) -> list[Any]:
        """Batches of at most ``size`` samples; :func:`split_batch`, unless overridden."""
        return split_batch(batch, size, self.batch_dim)

    def weigh(self, piece: Any) -> int | Tensor:
        """What the mean loss of a piece weighs, as ``count`` says, unless overridden.

        A number, or a tensor of no dimension, for which nothing waits.
        """
        return self.count_samples(piece) if self.count == "samples" else self._counter(piece)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._put_back()
        if stage == "fit":
            check_trainer(trainer, pl_module, AutoMicroBatch)
            self._messages.knows_size(None)
        if stage == "predict":
            return
        check_strategy(trainer)
        strategy, plugin = trainer.strategy, trainer.precision_plugin
        steps = partial(self._steps_of, trainer, pl_module, plugin.backward)
        for name in ("training_step", "validation_step", "test_step"):
            run = partial(self._run_step, trainer, pl_module, steps, name, getattr(strategy, name))
            self._undo.enter_context(replaced(strategy, name, run))
        self._undo.enter_context(replaced(plugin, "backward", partial(self._run_backward, trainer, steps)))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_wrapped(trainer.strategy.model)
        if trainer.world_size > 1 and self._group is None:
            self._group = HostGroup("during a training step")
        for optimizer in trainer.optimizers:
            if not any(optimizer is other for other in self._optimizers):  # training may start more than once in a fit
                self._optimizers.append(optimizer)
                step = self._optimizer_steps.step_of(optimizer, trainer.strategy.root_device)
                self._undo.enter_context(replaced(optimizer, "step", step))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is not None:
            self._steps.drop()
        if is_accumulating(trainer):  # else in the backward pass, before gradients are sent
            self._agree(trainer)
        self._messages.tell(self._training.limit, self._optimizer_steps.one_by_one, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agree(trainer)  # about the last step

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"training": self._training.state_dict(), "evaluation": self._evaluation.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.load_state_dict(state_dict["training"])
        self._evaluation.load_state_dict(state_dict["evaluation"])
        self._messages.knows_size(self._training.limit)

    def _put_back(self) -> None:
        self._undo.close()
        self._steps, self._optimizers = None, []
        if self._group is not None:
            self._group.close()
            self._group = None

    def _steps_of(
        self, trainer: pl.Trainer, module: pl.LightningModule, backward: Callable[..., None]
    ) -> StepsInPieces:
        if self._steps is None:  # at the first step, when the module is complete
            weigh = self.weigh if self.reduction == "mean" else None
            pieces = BatchPieces(self.count_samples, self.split, weigh)
            self._steps = StepsInPieces(trainer, module, pieces, backward)
        return self._steps

    def _run_step(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        steps_of: Callable[[], StepsInPieces],
        name: str,
        original: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """The strategy's step, with ours in place of the module's: inside the wrapped model and the precision."""
        steps, step = steps_of(), getattr(module, name)
        if name != "training_step":
            ours = partial(steps.evaluation_step, step, self._evaluation)
            with replaced(module, name, ours):
                output = original(*arguments)
            self._evaluation.grow()
            return output
        model = trainer.strategy.model
        alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
        with replaced(module, name, partial(steps.training_step, step, self._training)), alone:
            return original(*arguments)

    def _run_backward(self, trainer: pl.Trainer, steps_of: Callable[[], StepsInPieces], *arguments: Any) -> None:
        steps_of().backward(self._training, *arguments)
        if is_accumulating(trainer):
            return
        self._agree(trainer)
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            synchronize_gradients(trainer.strategy.model)
        self._training.grow()

    def _agree(self, trainer: pl.Trainer) -> None:
        if self._group is not None:
            agree(self._group, self._training, self._optimizer_steps, trainer.optimizers)
