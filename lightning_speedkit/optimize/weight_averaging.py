"""Averages of the weights, EMA or SWA, that never lose what was trained.

What it does: keeps a running average of the weights, validates with it, and leaves it in the module when training
ends. When it helps: the average of the last part of a run is usually better than its last weights, most of all with a
learning rate that is still high. What it costs: one more copy of the weights, and during validation a second one; one
pass over the weights per update.

Lightning 2.6.6 has ``WeightAveraging`` and ``EMAWeightAveraging``. They are right while the first update comes early
and nothing goes wrong. Where the start is never reached they put the initial weights over the trained ones, and before
it they validate with the initial weights (Lightning #21724); they leave the average in the module after an exception
in validation; a checkpoint saved during validation has both sets of weights the wrong way round, and one saved after
training has lost the weights that training ends with; they fail beside ``ModelPruning``. Here none of this is so. The
checkpoints have the same form, and those of Lightning's callbacks can be resumed.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.skipped_steps import SkippedSteps
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from lightning_speedkit.optimize.weight_averaging_values import WeightAverage, check_device

__all__ = ["AverageWeights"]


class AverageWeights(OneOfAKind):
    """Validates with a running average of the weights, and leaves it in the module when training ends.

    A checkpoint holds the average in ``state_dict``, which is what validation measured and what
    ``load_from_checkpoint`` and ``test(ckpt_path=...)`` are meant to get, and the weights to train on with in
    ``current_model_state``, whenever it is saved. A resumed run reaches the weights of an unbroken one. Before the
    first update there is one set of weights, that of training, and it is used everywhere.

    Args:
        by: ``"ema"`` for an exponential moving average, ``"swa"`` for one in which all updates weigh alike.
        decay: What ``"ema"`` keeps of the average at each update, from 0 up to, and without, 1; 0.999 if not given.
        warmup: Let the decay of ``"ema"`` grow, ``(1 + n) / (10 + n)`` at update ``n``, until it is ``decay``; so it
            is if not given.
        unit: What ``every`` and ``start`` count: optimizer ``"step"`` or ``"epoch"``. An epoch's update comes before
            the validation at its end.
        every: Update once in so many units.
        start: The units before the first update; a ``float`` below 1 is that share of the run, or less where no more
            than one update would be left.
        device: Where the average is kept, ``"cpu"`` say; ``None`` is the device of the module.

    Raises:
        ValueError: ``by``, ``decay``, ``unit``, ``every``, ``start`` or ``device`` is not allowed, or, at ``fit``, the
            device is not here.
        TypeError: ``decay`` is no number, or ``warmup`` no truth value.
        MisconfigurationException: At ``fit``: another callback averages weights, a strategy other than one device and
            DDP, or ``start`` is a share of a run whose length is not known.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> average = AverageWeights("swa", unit="epoch", start=0.5)
        >>> trainer = Trainer(callbacks=average, accelerator="cpu", max_epochs=4, barebones=True)
        >>> trainer.fit(BoringModel())
        >>> average.updates  # of the last two epochs
        2
    """

    def __init__(
        self,
        by: str = "ema",
        decay: float | None = None,
        warmup: bool | None = None,
        unit: str = "step",
        every: int = 1,
        start: int | float = 0,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if unit not in ("step", "epoch"):
            raise ValueError(f"unit={unit!r} is unknown; use 'step' (an optimizer step) or 'epoch'.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} is not allowed; it is a whole number of {unit}s, at least 1.")
        most = 1 if isinstance(start, float) else math.inf
        if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start < most:
            raise ValueError(
                f"start={start!r} is not allowed; it is a whole number of {unit}s from 0 on, or a share of the run: a "
                "float from 0.0 up to, and without, 1.0."
            )
        self.by, self.decay, self.warmup, self.device = by, decay, warmup, device
        self._has_warned = False  # that there is no average, in this fit
        self.unit, self.every, self.start = unit, every, start
        self._average = self._new_average()
        self._start = 0.0  # in units
        self._last = -1  # of which stretch of `every` units after the start the last update was

    @property
    def updates(self) -> int:
        """How many sets of weights the average holds."""
        return self._average.updates

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        check_device(self._average.device)
        _refuse(trainer)
        _warn_of_weights_only(trainer)
        _follow(trainer, self)
        self._average, self._last = self._new_average(), -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = self._units_before(trainer) if isinstance(self.start, float) else self.start
        self._warn_if_late(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        def update() -> None:
            self._update_if_due(trainer.global_step if self.unit == "step" else trainer.current_epoch + 1, pl_module)

        if self.unit == "step" or trainer.is_last_batch:  # before the validation at the end of the epoch
            SkippedSteps.of(trainer).once_known(self, update)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.unit == "epoch":  # the epoch ended before its last batch
            self._update_if_due(trainer.current_epoch + 1, pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._average.use(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._average.put_back(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._average.use(pl_module)
        if not self._average.updates and not self._has_warned:
            rank_zero_warn(
                f"AverageWeights made no average: its start, after {self._start:g} {self.unit}s, was not reached. The "
                "module keeps the weights that were trained. Choose an earlier start, or a share of the run such as "
                "start=0.75."
            )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._average.put_back(pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # the module is on the CPU now; a checkpoint that is saved later still needs both
            self._average.move("cpu")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "names": self._average.names(), "widened": self._average.widened()}

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average.updates:
            live, average = self._average.split_state(pl_module, checkpoint["state_dict"])
            checkpoint["current_model_state"], checkpoint["state_dict"] = live, average
            checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._average.updates)}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        own = checkpoint.get("callbacks", {}).get(self.state_key, {})
        self._last = own.get("last", -1)
        if "averaging_state" in checkpoint and "current_model_state" in checkpoint:
            values = {**checkpoint["state_dict"], **own.get("widened", {})}
            updates = int(checkpoint["averaging_state"]["n_averaged"])
            if updates:  # Lightning's callbacks save an average of nothing, too
                self._average.load(pl_module, values, updates, own.get("names", ()))
            pl_module.load_state_dict(checkpoint["current_model_state"], strict=pl_module.strict_loading)

    def _new_average(self) -> WeightAverage:
        return WeightAverage(self.by, self.decay, self.warmup, self.device)

    def _update_if_due(self, done: int, pl_module: pl.LightningModule) -> None:
        stretch = math.floor((done - self._start - 1) / self.every)
        if done > self._start and stretch > self._last:
            self._last = stretch
            self._average.update(pl_module)

    def _units_in(self, trainer: pl.Trainer) -> int | None:
        """How many units the run has, if that is known."""
        total = trainer.estimated_stepping_batches if self.unit == "step" else trainer.max_epochs
        return int(total) if total is not None and 0 <= total < math.inf else None

    def _warn_if_late(self, trainer: pl.Trainer) -> None:
        self._has_warned = False
        if self.start == 0 or self._average.updates or trainer.fast_dev_run or trainer.max_steps == 0:  # type: ignore[attr-defined]
            return
        try:
            total = self._units_in(trainer)
        except MisconfigurationException:  # of windows whose length depends on the batches
            return
        if total is not None and total <= self._start:
            self._has_warned = True
            rank_zero_warn(
                f"AverageWeights will make no average: its start comes after {self._start:g} {self.unit}s, and the run "
                f"has {total}. The module will keep the weights that are trained. Choose an earlier start, or a share "
                "of the run such as start=0.75."
            )

    def _units_before(self, trainer: pl.Trainer) -> int:
        total = self._units_in(trainer)
        if total is None:
            raise MisconfigurationException(
                f"start={self.start} is a share of the run, and the number of its {self.unit}s is not known. Give "
                f"start as a whole number of {self.unit}s, or the Trainer max_{self.unit}s."
            )
        return min(math.ceil(self.start * total), max(total - 1 - self.every, 0))


def _refuse(trainer: pl.Trainer) -> None:
    averaging = (AverageWeights, WeightAveraging, StochasticWeightAveraging)
    others = [c for c in trainer.callbacks if isinstance(c, averaging)]  # type: ignore[attr-defined]
    if len(others) > 1:
        names = " and ".join(type(callback).__name__ for callback in others)
        raise MisconfigurationException(f"{names} both put an average into the module. Keep one of them.")
    plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
        raise MisconfigurationException(
            f"AverageWeights does not work with {type(trainer.strategy).__name__}, where no process has the whole of "
            "the weights: it supports one device and DDP. Remove the callback."
        )


def _warn_of_weights_only(trainer: pl.Trainer) -> None:
    if any(isinstance(c, ModelCheckpoint) and c.save_weights_only for c in trainer.callbacks):  # type: ignore[attr-defined]
        rank_zero_warn(
            "ModelCheckpoint(save_weights_only=True) asks no callback, so during training it saves the weights that "
            "are trained, and not the average that validation measured. Set save_weights_only=False to save both."
        )


def _follow(trainer: pl.Trainer, callback: AverageWeights) -> None:
    """Run after ModelPruning, which makes the ``state_dict`` of a checkpoint anew, and guards, which uncount steps."""
    order = list(trainer.callbacks)  # type: ignore[attr-defined]
    earlier = [i for i, other in enumerate(order) if isinstance(other, (ModelPruning, NonFiniteGuard, SpikeGuard))]
    if earlier and order.index(callback) < earlier[-1]:
        order.remove(callback)
        order.insert(earlier[-1], callback)
        trainer.callbacks = order  # type: ignore[attr-defined]  # a new list: the old one is being gone through
