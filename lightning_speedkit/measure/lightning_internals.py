"""Every private attribute of Lightning that the kit reads or writes, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_internals.py`` checks each one against a real run, so that a
Lightning that renames or changes one fails there and not in a user's training.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

__all__ = ["forget_metric_attributes", "forget_static_graph_flush", "is_accumulating", "skips_backward"]


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
