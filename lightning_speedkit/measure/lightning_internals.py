"""Every private attribute of Lightning that the kit reads or writes, one function each.

Those of its loaders are in ``lightning_loaders.py``, those of accumulation windows in ``lightning_windows.py``, and the
way to its callbacks in ``lightning_hooks.py``. Read on Lightning 2.6.6. The test of the same name checks each one
against a real run, so that a Lightning that renames or changes one fails there and not in a user's training.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

__all__ = [
    "forget_metric_attributes",
    "forget_static_graph_flush",
    "has_hook_state",
    "is_accumulating",
    "logs_this_step",
    "loss_divisor",
    "read_optimizers",
    "set_bucket_mb",
    "skips_backward",
    "uncount_step",
]


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch in progress only adds to the gradient: no optimizer step follows it.

    Right from ``on_train_batch_start`` until the end of that batch's hooks; the last batch of an epoch always steps.
    Reads ``fit_loop.epoch_loop._should_accumulate``.
    """
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


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


def has_hook_state(strategy: DDPStrategy) -> bool:
    """Whether ``strategy`` was given a state for its communication hook, as ``ddp_comm_state``.

    Reads ``DDPStrategy._ddp_comm_state``.
    """
    return strategy._ddp_comm_state is not None


def forget_static_graph_flush(strategy: DDPStrategy) -> None:
    """Let a newly wrapped model flush its first static-graph iteration again, under manual optimization.

    Lightning does this once per strategy object, and torch needs it once per wrapped model: without it, the first
    step of a second ``fit`` is not synchronised. Clears ``DDPStrategy._pl_static_graph_delay_done``.
    """
    if not hasattr(strategy, "_pl_static_graph_delay_done"):
        raise AttributeError("This version of Lightning has no DDPStrategy._pl_static_graph_delay_done.")
    strategy._pl_static_graph_delay_done = False


def set_bucket_mb(strategy: DDPStrategy, mebibytes: float) -> None:
    """Let the model that ``strategy`` wraps next send its gradients in buckets of this size.

    Changes ``DDPStrategy._ddp_kwargs``.
    """
    strategy._ddp_kwargs["bucket_cap_mb"] = mebibytes


def forget_metric_attributes(module: pl.LightningModule) -> None:
    """Let ``module.log`` look for the names of the module's metrics again.

    Lightning finds them once and knows them by ``id()``. A copy inherits the list and has other metrics, so logging
    one of them would fail. Clears ``LightningModule._metric_attributes``.
    """
    if not hasattr(module, "_metric_attributes"):
        raise AttributeError("This version of Lightning has no LightningModule._metric_attributes.")
    module._metric_attributes = None


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


def loss_divisor(trainer: pl.Trainer) -> float:
    """What the loss of the batch in progress was divided by before its backward: the accumulation factor, or 1.

    It is 1 under ``follow_windows``, whatever the factor. Asks
    ``fit_loop.epoch_loop.automatic_optimization.output_result_cls``.
    """
    factor = trainer.accumulate_grad_batches
    if factor == 1:
        return 1.0
    return _divisor_of(trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls, factor)


@functools.lru_cache(maxsize=8)  # it is the same for all batches of a window
def _divisor_of(result: type[ClosureResult], factor: int) -> float:
    divided = result.from_training_step_output(torch.ones((), dtype=torch.float64, device="cpu"), factor).closure_loss
    assert divided is not None
    return 1 / divided.item()
