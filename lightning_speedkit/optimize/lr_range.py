"""The learning-rate range test of a Trainer's own run, before it trains.

What it does: see ``lr_range_sweep``. Each step goes through the Trainer's strategy and precision, beside Lightning's
loops: no counter moves, no callback is called, and nothing has to be loaded back from a checkpoint file, as Lightning's
own finder does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.measure.kept_state import GENERATORS, KeptState, keeping
from lightning_speedkit.measure.lightning_loaders import batch_on_device, change_train_dataloaders, trial_batches
from lightning_speedkit.optimize.lr_range_curve import LRRange
from lightning_speedkit.optimize.lr_range_rates import scale_schedule
from lightning_speedkit.optimize.lr_range_sweep import again_and_again, check_range, sweep
from lightning_speedkit.optimize.optimizer_options import checked_flag

__all__ = ["LRRangeTest"]


class LRRangeTest(Callback):
    """Tries learning rates before training starts, and puts everything back; at choice it sets the rate it suggests.

    A step is what the Trainer's would be: precision, gradient scaling, the Trainer's clipping, accumulation, DDP and
    the hooks for batches. Other callbacks see nothing of it, nothing is logged, and no counter moves. It runs once per
    ``fit``, not for a resumed one, and not under ``fast_dev_run`` and ``barebones``.

    Args:
        lowest: The rate of the first step, of the parameter group with the highest rate.
        highest: The rate of the last step.
        steps: The number of steps, at least 5.
        divergence: Stop when the loss, smoothed, is this many times its best value.
        apply: Multiply the learning rates of all parameter groups, and of their schedules, so that the highest is the
            one suggested. By default nothing is changed.
        plot: A file for the curve, ``.svg`` or ``.png``; needs matplotlib.

    Attributes:
        result: The :class:`LRRange` of the last ``fit``, or ``None``.

    Raises:
        ValueError: An argument is outside its range; or, at ``fit``, there are no batches, or each can be had once.
        TypeError: A rate is no number, or ``apply`` no truth value.
        MisconfigurationException: At ``fit``: manual optimization, a ``training_step`` that takes ``dataloader_iter``,
            no optimizer, or a strategy other than one device and DDP.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> test = LRRangeTest(steps=30)
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> trainer = Trainer(callbacks=test, accelerator="cpu", max_steps=0, enable_checkpointing=False, **quiet)
        >>> trainer.fit(BoringModel())
        >>> len(test.result.losses) <= 30
        True
    """

    def __init__(
        self,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        divergence: float = 4.0,
        apply: bool = False,
        plot: str | None = None,
    ) -> None:
        super().__init__()
        check_range(lowest, highest, steps, divergence)
        if plot is not None and not str(plot).lower().endswith((".svg", ".png")):
            raise ValueError(f"plot={plot!r} must be the path of a file that ends in .svg or .png.")
        self.lowest, self.highest, self.steps, self.divergence = lowest, highest, steps, divergence
        self.apply, self.plot = checked_flag("apply", apply), plot
        self.result: LRRange | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.result = None
        if trainer.fast_dev_run or trainer.barebones or trainer.ckpt_path or not trainer.limit_train_batches:  # type: ignore[attr-defined]
            rank_zero_info(
                "LRRangeTest tries nothing in a resumed run, without batches, under fast_dev_run or barebones."
            )
            return
        _refuse(trainer, pl_module)
        self.result = self._try(trainer, pl_module)
        self._tell(trainer, self.result)

    def _try(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> LRRange:
        optimizer = trainer.optimizers[0]
        with keeping() as keep, torch.enable_grad():
            _keep_run(keep, trainer, pl_module)
            undo = change_train_dataloaders(trainer, lambda given: _kept_loaders(keep, given))
            try:
                with trial_batches(trainer) as batches:
                    stream = again_and_again(batches)
                    return sweep(
                        lambda: _step(trainer, pl_module, optimizer, stream),
                        optimizer,
                        self.lowest,
                        self.highest,
                        self.steps,
                        self.divergence,
                    )
            finally:
                undo()

    def _tell(self, trainer: pl.Trainer, result: LRRange) -> None:
        rate = result.suggestion
        rank_zero_info(
            f"Learning-rate range test: {len(result.losses)} steps from {self.lowest:g} on, "
            f"{'stopped where the loss diverged, ' if result.diverged else ''}"
            f"{'no suggestion' if rate is None else f'suggestion {rate:.3g}'}."
        )
        if self.plot is not None and result.losses and trainer.is_global_zero:
            result.plot(self.plot)
        if self.apply and rate is None:
            rank_zero_warn("LRRangeTest found no rate at which the loss clearly falls; the learning rates stay.")
        elif self.apply and rate is not None:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            scale_schedule(trainer.optimizers[0], schedulers, rate)


def _refuse(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"LRRangeTest takes the optimizer's steps itself, and {name} sets automatic_optimization = False. Remove "
            "the callback, and call lr_range_test of lightning_speedkit.optimize."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"LRRangeTest hands over the batches, and {name}.training_step takes the dataloader_iter. Let it take "
            "(batch, batch_idx), or remove the callback."
        )
    if len(trainer.optimizers) != 1 or not trainer.optimizers[0].param_groups:  # for none there is a stand-in
        raise MisconfigurationException(
            f"LRRangeTest needs one optimizer, and {name}.configure_optimizers() returned another number of them."
        )
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"LRRangeTest does not work with {type(trainer.strategy).__name__}: it supports one device and DDP. Try "
            "the rates on one device."
        )


def _keep_run(keep: KeptState, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Keep what a step changes, and turn off what would tell of it."""
    keep.random_states()
    keep.module(pl_module)
    keep.attributes(trainer.optimizers[0])
    keep.attributes(trainer.precision_plugin)
    if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
        keep.attributes(scaler)
    if (datamodule := trainer.datamodule) is not None:  # type: ignore[attr-defined]
        keep.attributes(datamodule, contents=GENERATORS)  # the rest may be all of the data
    keep.replaced(trainer, "callbacks", [])
    keep.replaced(trainer, "loggers", [DummyLogger() for _ in trainer.loggers])
    for name in ("log", "log_dict"):  # outside of Lightning's loops they raise
        keep.replaced(pl_module, name, lambda *_, **__: None)


def _kept_loaders(keep: KeptState, given: Any) -> Any:
    keep.loaders(given)
    return given


def _step(
    trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer, stream: Iterator[Any]
) -> Tensor | None:
    """One optimizer step, over as many batches as the Trainer accumulates; returns the mean of their losses."""
    batches = [batch_on_device(trainer, next(stream)) for _ in range(trainer.accumulate_grad_batches)]
    takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    results: list[Tensor | None] = []

    def closure() -> Tensor | None:
        optimizer.zero_grad()
        losses = []
        for index, batch in enumerate(batches):
            output: Any = trainer.strategy.training_step(*((batch, index) if takes_index else (batch,)))
            loss = output["loss"] if isinstance(output, dict) else output
            if loss is not None:
                trainer.strategy.backward(loss / len(batches), optimizer)
                losses.append(loss.detach())
        results.append(torch.stack(losses).mean() if losses else None)
        return results[-1]

    trainer.strategy.optimizer_step(optimizer, closure, model=pl_module)
    return results[0]
