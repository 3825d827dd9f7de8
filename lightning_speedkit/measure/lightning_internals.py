"""Every private attribute of Lightning that the kit reads or writes, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_internals.py`` checks each one against a real run, so that a
Lightning that renames or changes one fails there and not in a user's training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

__all__ = [
    "change_train_dataloaders",
    "epochs_done",
    "forget_metric_attributes",
    "forget_static_graph_flush",
    "is_accumulating",
    "recount_batches",
    "skips_backward",
]


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


def change_train_dataloaders(trainer: pl.Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let ``change`` see what ``fit`` gets as training loaders, and put its answer in their place.

    ``change`` is called on every rank each time that Lightning asks for the loaders: at the start of ``fit``, when
    ``estimated_stepping_batches`` is read, and when they are reloaded. What it returns is treated as if the user had
    given it: a DataLoader made there can be made anew with a distributed sampler. Returns what undoes it.

    Sets ``dataloader`` of ``fit_loop._data_source``.
    """
    source = trainer.fit_loop._data_source
    if not callable(getattr(source, "dataloader", None)):
        raise AttributeError("This version of Lightning has no _DataLoaderSource.dataloader().")
    given = source.dataloader
    found = vars(source).get("dataloader")

    def changed() -> Any:
        return change(given())

    def undo() -> None:
        if vars(source).get("dataloader") is changed:
            del source.dataloader
            if found is not None:
                source.dataloader = found  # type: ignore[method-assign]

    source.dataloader = changed  # type: ignore[method-assign]
    return undo


def epochs_done(trainer: pl.Trainer) -> int | None:
    """How many epochs the checkpoint that is being restored counts as done, or ``None`` if it is not of a fit.

    To be called from the ``load_state_dict`` of a DataModule. Reads ``_checkpoint_connector._loaded_checkpoint``.
    """
    fit_loop = trainer._checkpoint_connector._loaded_checkpoint.get("loops", {}).get("fit_loop", {})
    done = fit_loop.get("epoch_progress", {}).get("current", {}).get("processed")
    return None if done is None else int(done)


def recount_batches(trainer: pl.Trainer, batches: int) -> None:
    """Say in the checkpoint that is being restored how many batches of the unfinished epoch were done.

    For a run that goes on with another number of ranks: its batches are larger or smaller. To be called from the
    ``load_state_dict`` of a DataModule, which Lightning restores before its loops. Changes
    ``_checkpoint_connector._loaded_checkpoint``, the copy that Lightning reads the loops from; nothing is done if the
    checkpoint is not of a fit, or says the same.
    """
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    current = progress.get("current", {})
    done = current.get("ready", batches)
    for name, value in current.items():
        if isinstance(value, int) and not isinstance(value, bool):
            current[name] = value + batches - done
