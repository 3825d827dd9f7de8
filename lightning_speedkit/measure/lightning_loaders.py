"""Every private attribute of Lightning's data handling that the kit reads or writes, one function each.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_loaders.py`` checks each one against a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl

__all__ = ["batch_on_device", "change_train_dataloaders", "epochs_done", "recount_batches", "trial_batches"]


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


@contextmanager
def trial_batches(trainer: pl.Trainer) -> Iterator[Iterable[Any]]:
    """The training batches, from loaders that are made anew for this alone; can be iterated again and again.

    Afterwards ``fit`` is where it was: if it had no loaders yet, it will ask for them as if nothing had happened. For
    ``on_fit_start``, on all ranks. Lets ``fit_loop.setup_data`` set its private ``_combined_loader`` and
    ``_data_fetcher``, and puts back what they were.
    """
    loop = trainer.fit_loop
    names = ("_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", "max_batches")
    found = {name: getattr(loop, name) for name in names}
    interval = trainer.val_check_batch
    loop._combined_loader = None
    try:
        loop.setup_data()
        loader = loop._combined_loader
        yield _BatchesAlone(() if loader is None else loader, loop.max_batches)
    finally:
        if loop._data_fetcher is not None and loop._data_fetcher is not found["_data_fetcher"]:
            loop._data_fetcher.teardown()  # ends its workers
        for name, value in found.items():
            setattr(loop, name, value)
        trainer.val_check_batch = interval


class _BatchesAlone:
    """The batches of an epoch of a CombinedLoader, without their numbers."""

    def __init__(self, loader: Iterable[Any], most: float) -> None:
        self.loader, self.most = loader, most

    def __iter__(self) -> Iterator[Any]:
        most = None if self.most == float("inf") else int(self.most)
        return (batch for batch, *_ in islice(self.loader, most))


def batch_on_device(trainer: pl.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """A batch of a loader as the step gets it: after the precision's and the user's hooks, on the device.

    Calls ``LightningModule._on_before_batch_transfer``.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
