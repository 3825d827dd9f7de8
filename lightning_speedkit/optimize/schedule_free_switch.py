"""The switches of schedule-free training, in every place where a Trainer looks at the weights.

What it does: validation, checkpoints and the end of a fit see the averaged weights of ``ScheduleFreeAdamW``, training
its own. When it helps: it is needed with that optimizer; without it, other weights are validated and saved than are
meant to be used. What it costs: two copies of the weights per validation, and one average per checkpoint. Lightning has
no such switch (Lightning #20441).
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from typing_extensions import override

from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.weight_averaging import AverageWeights

__all__ = ["ScheduleFreeSwitch"]


class ScheduleFreeSwitch(Callback):
    """Puts the averaged weights of ``ScheduleFreeAdamW`` in place wherever the model is looked at.

    That is in validation, in every checkpoint, and from the end of ``fit`` on, also after an exception. In between, the
    training weights come back bit for bit, so a run with validation equals one without. With another optimizer the
    callback does nothing. A run resumes from its checkpoints exactly. Its place among the callbacks does not matter:
    with that optimizer it moves to the front of the Trainer's list.

    ``trainer.save_checkpoint(path, weights_only=True)`` calls no hook of a callback: inside a batch such a file has the
    training weights. The files of ``ModelCheckpoint(save_weights_only=True)`` have the average.

    Raises:
        MisconfigurationException: At ``fit``, with a second averaging of weights (SWA, EMA).

    Example:

        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def configure_optimizers(self):
        ...         return ScheduleFreeAdamW(self.parameters(), lr=0.01)
        >>> trainer = pl.Trainer(
        ...     max_steps=2, accelerator="cpu", callbacks=ScheduleFreeSwitch(), barebones=True
        ... )
        >>> trainer.fit(model := Model())
        >>> trainer.optimizers[0].is_training
        False
    """

    def __init__(self) -> None:
        super().__init__()
        self._saves_bare_weights = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _schedule_free(trainer):
            _refuse_second_average(trainer)
            _go_first(trainer, self)
        self._saves_bare_weights = any(getattr(c, "save_weights_only", False) for c in trainer.checkpoint_callbacks)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for optimizer in _schedule_free(trainer):
            optimizer.train()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._saves_bare_weights:  # such a file is written after this hook, and no other one is called
            self._show_average(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_average(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_average(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_average(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._show_average(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for optimizer in _schedule_free(trainer):
            if optimizer.is_training:
                averages = optimizer.averages()
                for key, value in pl_module.state_dict(keep_vars=True).items():
                    if key in checkpoint["state_dict"] and value in averages:
                        checkpoint["state_dict"][key] = averages[value]

    def _show_average(self, trainer: pl.Trainer) -> None:
        for optimizer in _schedule_free(trainer):
            optimizer.eval()


def _refuse_second_average(trainer: pl.Trainer) -> None:
    averaging = (AverageWeights, WeightAveraging, StochasticWeightAveraging)
    others = [c for c in trainer.callbacks if isinstance(c, averaging)]  # type: ignore[attr-defined]
    if others:
        raise MisconfigurationException(
            f"{type(others[0]).__name__} and ScheduleFreeAdamW both average the weights. Remove the callback, or use "
            "another optimizer."
        )


def _go_first(trainer: pl.Trainer, callback: Callback) -> None:
    """Let other callbacks find the weights switched, such as one that keeps those of training as a batch starts."""
    rest = [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]
    trainer.callbacks = [callback, *rest]  # type: ignore[attr-defined]  # a new list: the old one is being gone through


def _schedule_free(trainer: pl.Trainer) -> list[ScheduleFreeAdamW]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, ScheduleFreeAdamW)]
