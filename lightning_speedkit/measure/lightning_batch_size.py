"""The private attributes of Lightning that a search for a batch size needs: its loaders, made for a trial alone.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_batch_size.py`` checks each one against a real run.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader

__all__ = ["forget_train_loaders", "loader_owner", "made_train_loader", "made_val_loaders"]


def loader_owner(trainer: pl.Trainer) -> pl.LightningModule | pl.LightningDataModule | None:
    """Whose ``train_dataloader()`` gives the training loaders; ``None`` if they were given to ``fit``.

    Reads ``instance`` of ``fit_loop._data_source``.
    """
    source = trainer.fit_loop._data_source
    instance: Any = source.instance
    return instance if source.is_module() else None


def made_train_loader(trainer: pl.Trainer) -> CombinedLoader:
    """The training loaders as ``fit`` would make them now, with their distributed samplers; ``fit`` does not get them.

    To be called on all ranks. Calls ``_request_dataloader`` and ``_process_dataloader`` of Lightning's data connector.
    """
    return _made(trainer, trainer.fit_loop._data_source, "max_size_cycle", RunningStage.TRAINING)


def made_val_loaders(trainer: pl.Trainer) -> list[Any]:
    """The same for the validation loaders; none if ``fit`` will not validate.

    Reads ``_data_source`` of ``fit_loop.epoch_loop.val_loop``.
    """
    if not trainer.enable_validation:
        return []
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return list(_made(trainer, source, "sequential", RunningStage.VALIDATING).flattened)


def _made(trainer: pl.Trainer, source: Any, mode: Any, stage: RunningStage) -> CombinedLoader:
    with warnings.catch_warnings():  # advice on workers belongs to the loaders that train
        warnings.simplefilter("ignore", PossibleUserWarning)
        given = data_connector._request_dataloader(source)
        combined = copy.copy(given) if isinstance(given, CombinedLoader) else CombinedLoader(given, mode)
        combined.flattened = [
            data_connector._process_dataloader(trainer, TrainerFn.FITTING, stage, loader)
            for loader in combined.flattened
        ]
    return combined


def forget_train_loaders(trainer: pl.Trainer) -> bool:
    """Let ``fit`` ask for its training loaders anew; whether it had asked before.

    It has if ``estimated_stepping_batches`` was read. Clears ``fit_loop._combined_loader``, and ends the workers of
    ``fit_loop._data_fetcher``.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is None:
        return False
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None
    return True
