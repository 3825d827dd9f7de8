"""Every private attribute of Lightning that the kit reads or writes, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_internals.py`` checks each one against a real run, so that a
Lightning that renames or changes one fails there and not in a user's training.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

__all__ = ["forget_static_graph_flush", "is_accumulating", "skips_backward"]


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
