"""What quantization takes from the fit that has just ended: its best weights, watched metrics and validation data."""

from __future__ import annotations

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.judge import ValidationData
from lightning_speedkit.errors import QuantizationError

__all__ = ["is_trial_run", "monitored", "validation_data", "why_untrained", "with_best_weights"]


def with_best_weights(trainer: pl.Trainer, pl_module: pl.LightningModule) -> pl.LightningModule:
    """A copy of the module with the weights of the best checkpoint of this fit.

    Raises:
        QuantizationError: There is no such checkpoint, or it cannot be loaded.
    """
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not path:
        raise QuantizationError("weights='best': this fit has written no best checkpoint. Use weights='last'.")
    try:
        checkpoint = _read_checkpoint(trainer, path)
        twin = copy_module(pl_module)
        twin.on_load_checkpoint(checkpoint)
        twin.load_state_dict(checkpoint["state_dict"], strict=pl_module.strict_loading)
    except (OSError, RuntimeError, KeyError) as error:
        raise QuantizationError(
            f"weights='best': {path} could not be loaded ({type(error).__name__}: {error})."
        ) from error
    return twin


def _read_checkpoint(trainer: pl.Trainer, path: str) -> dict[str, Any]:
    read: Any = trainer.strategy.checkpoint_io.load_checkpoint
    try:
        found: Mapping[str, Any] = read(path, map_location="cpu", weights_only=True)
    except UnpicklingError:  # it holds objects of the user's own, and was written by this very run
        found = read(path, map_location="cpu", weights_only=False)
    return dict(found)


def is_trial_run(trainer: pl.Trainer) -> bool:
    """Whether the fit only tries the code (``fast_dev_run``) or measures the Trainer (``barebones``)."""
    return bool(getattr(trainer, "fast_dev_run", False)) or trainer.barebones


def why_untrained(trainer: pl.Trainer) -> str:
    """Why a fit that is over has trained no batch, as far as the Trainer tells."""
    asked = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "limit_train_batches")}
    if nothing := [f"{name}={value}" for name, value in asked.items() if value == 0]:
        return f"{nothing[0]} asks for none"
    for name, done in (("max_epochs", trainer.current_epoch), ("max_steps", trainer.global_step)):
        if asked[name] is not None and 0 < asked[name] <= done:
            return f"{name}={asked[name]} was reached before; set it higher to go on"
    return "the training loader gave none"


def monitored(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """The metrics that callbacks watch, each with ``"min"`` or ``"max"``, those that save checkpoints first."""
    watching = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    return [(c.monitor, c.mode) for c in watching if isinstance(c, (ModelCheckpoint, EarlyStopping)) and c.monitor]


def validation_data(trainer: pl.Trainer, limit: int | None) -> ValidationData | None:
    """What the fit validated on, up to ``limit`` batches per loader; ``None`` if it had no validation."""
    loaders = trainer.val_dataloaders
    if not loaders:
        return None
    longest = max((float(count) for count in trainer.num_val_batches), default=0.0)
    limits = [count for count in (limit, int(longest) if longest < float("inf") else None) if count is not None]
    return ValidationData(
        loaders=loaders,
        datamodule=getattr(trainer, "datamodule", None),
        limit_batches=min(limits) if limits else None,
        in_float32=str(trainer.precision).endswith("-true") and trainer.precision != "32-true",
    )
