"""Gradient accumulation whose step is the step of one big batch.

What it does: a window of micro-batches gives the gradient of the mean loss over all samples of the window. Lightning's
own accumulation divides each loss by the factor. That is the same thing for a full window of equal micro-batches on
equal ranks, and a wrong gradient otherwise: the last, short window of an epoch comes out too small (Lightning #19987),
and a sample in a small micro-batch weighs more than one in a big one (Lightning #20350).

When it helps: the batch that you want does not fit into memory. What it costs: where ranks are joined, the sum of one
number over them per window, and one multiplication of the gradients. On one device, nothing while the windows are
full and the micro-batches equal, and then the weights equal Lightning's own bit for bit.

How: a loss is weighted by its samples, relative to the first micro-batch of its window, in its backward pass. Before
the last backward of the window, the gradients so far are scaled and the last loss is weighted so that what is
synchronised, clipped and stepped with is right already, whatever other callbacks look at it. Under float16 all this
happens to scaled losses and gradients, which is the same, since it is linear. There the gradients so far are scaled
down before a larger micro-batch comes, since a large weight would make its gradient infinite.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.measure.lightning_internals import is_accumulating, skips_backward
from lightning_speedkit.optimize.accumulation_schedule import checked_schedule, factor_at
from lightning_speedkit.optimize.accumulation_window import (
    AccumulationWindow,
    samples_in,
    scale_gradients,
    weigh_backward,
)

__all__ = ["AccumulationScheduler"]

_FLOAT16 = ("16-mixed", "16-true", "transformer-engine-float16")


def _refuse(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Raise if this Trainer and module cannot accumulate in the way of this file."""
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"AccumulationScheduler works with automatic optimization, and {type(pl_module).__name__} sets "
            "automatic_optimization = False. Remove the callback, and use AccumulationWindow of "
            "lightning_speedkit.optimize in your training_step."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"AccumulationScheduler has to see each batch, and {type(pl_module).__name__}.training_step takes the "
            "dataloader_iter. Let it take (batch, batch_idx), or remove the callback."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and AccumulationScheduler set the "
            "same thing. Remove one of them."
        )
    others = [c for c in trainer.callbacks if isinstance(c, (AccumulationScheduler, GradientAccumulationScheduler))]  # type: ignore[attr-defined]
    if len(others) > 1:
        names = " and ".join(type(callback).__name__ for callback in others)
        raise MisconfigurationException(f"{names} set the same thing: the accumulation factor. Keep one of them.")
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"AccumulationScheduler does not work with {type(trainer.strategy).__name__}, which keeps unfinished "
            "gradients out of reach: it supports one device and DDP. Remove the callback, and set "
            "Trainer(accumulate_grad_batches=...) if the strategy takes it."
        )


def _sum_over_ranks(number: int, device: torch.device) -> Tensor:
    """The sum, on the device. Nothing waits for it: Strategy.reduce would set a barrier before it."""
    total = torch.full((), number, dtype=torch.float64, device=device)  # filled there: a copy would wait
    torch.distributed.all_reduce(total)
    return total


def _parameters(trainer: pl.Trainer) -> Iterator[Tensor]:
    return (parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"])


class AccumulationScheduler(Callback):
    """Accumulates gradients over micro-batches so that each step equals the step of one batch of all their samples.

    Holds for the short last window of an epoch, micro-batches of different sizes, and ranks with different numbers
    of samples; clipping, other callbacks and the optimizer see the true gradient. The loss of a micro-batch has to be
    the mean over its samples. ``trainer.accumulate_grad_batches`` is set during ``fit`` and put back after it.

    Where the samples of a batch cannot be told from its tensors, override :meth:`count_samples`.

    Args:
        schedule: The number of micro-batches per step, or ``{start: number}`` where starts count from 0. It is 1
            before the first start.
        unit: What starts count. Only ``"epoch"`` so far.
        count: ``"samples"`` weighs each micro-batch by its number of samples, ``"batches"`` weighs all of them alike.

    Raises:
        ValueError: ``schedule``, ``unit`` or ``count`` is not allowed; or, during ``fit``, the samples of a batch
            cannot be told.
        TypeError: A start or number is no whole number; or, during ``fit``, :meth:`count_samples` returns none.
        MisconfigurationException: At ``fit``: manual optimization, an optimizer that evaluates its closure several
            times (LBFGS, SAM), a ``training_step`` that takes ``dataloader_iter``, a second callback or Trainer
            argument that sets the factor, or a strategy other than one device and DDP.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> short = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 0, "barebones": True}
        >>> trainer = Trainer(callbacks=AccumulationScheduler({0: 1, 1: 4}), accelerator="cpu", **short)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step  # 6 steps of one batch, then one of 4 batches and one of 2
        8
    """

    def __init__(self, schedule: int | dict[int, int] = 1, unit: str = "epoch", count: str = "samples") -> None:
        super().__init__()
        if unit != "epoch":
            raise ValueError(
                f"unit={unit!r} is not supported: a schedule counts in 'epoch'. A factor that changes inside an epoch "
                "is not possible yet, since Lightning would clear gradients that were not stepped with."
            )
        if count not in ("samples", "batches"):
            raise ValueError(f"count={count!r} is unknown; use 'samples' or 'batches'.")
        self.schedule = checked_schedule(schedule)
        self.unit = unit
        self.count = count
        self._found: int | None = None  # the Trainer's own factor, while ours is set
        self._window: AccumulationWindow | None = None  # from the clearing of the gradients to the last backward
        self._samples = 1  # of the micro-batch in progress
        self._had_backward = False  # the micro-batch in progress
        self._is_first_window = True
        self._warned = False

    def count_samples(self, batch: Any) -> int:
        """The number of samples in a batch; :func:`samples_in`, unless overridden.

        Return an ``int``. A tensor of one whole number is read, which waits for its device.
        """
        return samples_in(batch)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            _refuse(trainer, pl_module)
            self._found = trainer.accumulate_grad_batches
            self._set_factor(trainer)  # now: configure_optimizers may read estimated_stepping_batches

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            self._refuse_repeats(trainer)
        self._window, self._is_first_window, self._warned = None, True, False
        self._set_factor(trainer)  # a run resumed inside an epoch has no on_train_epoch_start

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set_factor(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        alone = trainer.world_size == 1 and trainer.accumulate_grad_batches == 1
        self._samples = 1 if alone or self.count == "batches" else self._counted(batch)
        self._had_backward = False

    @override
    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._warn_if_dropped()
        self._window = AccumulationWindow(divided_by=trainer.accumulate_grad_batches)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._had_backward:
            self._refuse_repeats(trainer)
        self._had_backward = True
        window = self._window or self._late_window(trainer)
        if self._is_first_window and not window.batches:
            window.reference = self._mean_over_ranks(trainer, self._samples)
        elif trainer.precision in _FLOAT16:
            scale_gradients(_parameters(trainer), window.raise_reference(self._samples))
        weight: float | Tensor = window.add(self._samples)
        if not is_accumulating(trainer):
            weight = weight * self._close(trainer, window)
        weigh_backward(loss, weight)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._window is not None:  # the last micro-batch had no loss: training_step returned None
            if getattr(trainer.precision_plugin, "scaler", None) is not None:
                self._warn_if_dropped()
            self._close(trainer, self._window)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn_if_dropped()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back(trainer)

    def _set_factor(self, trainer: pl.Trainer) -> None:
        if not skips_backward(trainer):  # StochasticWeightAveraging sets the factor of such an epoch itself
            trainer.accumulate_grad_batches = factor_at(self.schedule, trainer.current_epoch)

    def _put_back(self, trainer: pl.Trainer) -> None:
        if self._found is not None:
            trainer.accumulate_grad_batches, self._found = self._found, None

    def _counted(self, batch: Any) -> int:
        try:
            samples = self.count_samples(batch)
        except ValueError as error:
            raise ValueError(
                f"{error} AccumulationScheduler weighs a batch by it. Override count_samples(batch) in a subclass, or "
                "pass count='batches' to weigh all batches alike."
            ) from error
        try:
            return operator.index(samples)
        except TypeError:
            raise TypeError(f"count_samples() has to return a whole number, and returned {samples!r}.") from None

    def _refuse_repeats(self, trainer: pl.Trainer) -> None:
        if max(self.schedule.values()) > 1:
            raise MisconfigurationException(
                f"AccumulationScheduler does not work with {type(trainer.optimizers[0]).__name__}, which evaluates the "
                "last micro-batch of a window several times. Use another optimizer, or a schedule of 1."
            )

    def _mean_over_ranks(self, trainer: pl.Trainer, samples: int) -> float:
        """Once per fit: a static graph averages the first backward at once, so its weights need one reference."""
        if trainer.world_size == 1 or self.count == "batches":
            return samples
        return float(_sum_over_ranks(samples, trainer.strategy.root_device)) / trainer.world_size

    def _close(self, trainer: pl.Trainer, window: AccumulationWindow) -> float | Tensor:
        """Scale the gradients so far; returns what the weight of the last loss is to be multiplied by."""
        if trainer.world_size > 1 and self.count == "samples":
            scale = window.scale(_sum_over_ranks(window.samples, trainer.strategy.root_device), trainer.world_size)
        else:
            scale = window.scale()
        scale_gradients(_parameters(trainer), scale)
        self._window, self._is_first_window = None, False
        return scale

    def _late_window(self, trainer: pl.Trainer) -> AccumulationWindow:
        """The window of a micro-batch that is not the first of its window, and before which nothing was cleared.

        Either the first one had no batch (the loader gave ``None``), so the gradients of the last step are still
        there; or the run resumed inside a window, whose gradients are in no checkpoint.
        """
        if self._is_first_window:
            rank_zero_warn(
                "The run resumes inside an accumulation window. The gradient of the window's micro-batches before the "
                "checkpoint is lost; the next step is that of the remaining ones. Save checkpoints between windows."
            )
        trainer.optimizers[0].zero_grad()
        self._window = AccumulationWindow(divided_by=trainer.accumulate_grad_batches)
        return self._window

    def _warn_if_dropped(self) -> None:
        if self._window is not None and self._window.batches and not self._warned:
            self._warned = True
            rank_zero_warn(
                "An epoch ended early, a batch was None, or under float16 the last micro-batch had no loss, inside an "
                "accumulation window: Lightning takes no step there, and the gradient of the micro-batches since the "
                "last step is lost."
            )
