"""Trains the last part of a fit with the rounding that int8 inference will do, so that quantizing costs less quality.

What it does: from ``start`` on, weights and the inputs of layers are rounded in the training step to the grid of the
integers ("fake quantization"), and the gradient passes through as if they were not. The network learns weights for
which the rounding does little harm. ``FakeQuantization`` does it in a loop of your own, and
``QuantizationAwareTraining`` in a Trainer.

When it helps: few bits (int4 weights), small networks, and those that lose accuracy when they are quantized after
training; where int8 after training loses nothing, it gains nothing. What it costs: one pass over the weights and over
each layer's input per step, while it is on.

Source: Jacob et al. 2018 (arXiv 1712.05877). Lightning's own callback, which it had until 2.0, replaced the module's
layers (removed in Lightning #16750).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.compress.module_names import check_names
from lightning_speedkit.compress.quantize_arguments import check_skip
from lightning_speedkit.compress.quantize_aware_layers import FakeQuantization, check_fake_scheme
from lightning_speedkit.compress.quantize_fit import is_trial_run, why_untrained

__all__ = ["FakeQuantization", "QuantizationAwareTraining"]


class QuantizationAwareTraining(Callback):
    """Rounds weights and layer inputs in the last part of the fit as int8 inference will.

    The module stays in float: its parameters, their names, checkpoints and optimizer are those of a plain run, and
    after training its layers are plain. Quantize it then, with ``QuantizeOnFitEnd`` in the same Trainer or with
    ``quantize_model``. ``layers`` and ``skipped`` say what is rounded, ``ranges`` what was learnt.

    Args:
        scheme: ``"static-int8"`` for Linear, convolution and attention layers; ``"dynamic-int8"``,
            ``"weight-only-int8"`` and ``"weight-only-int4"`` for Linear and attention layers only. Take the scheme that
            the model will be quantized with.
        start: When rounding starts: a ``float`` is a share of the fit, a whole number counts ``unit``. A share below
            1.0 starts at the last optimizer step at the latest, if the fit has two or more.
        freeze_ranges: When the running ranges of ``"static-int8"`` stop moving, in the same way; not before the start.
            The first batch that is rounded gives a range in any case.
        unit: What whole numbers count: optimizer ``"step"`` or ``"epoch"``.
        in_validation: Round in the validation of the fit, too, once rounding has started. By default validation
            measures the float model.
        skip: Names of modules that are not rounded; ``*`` and ``?`` are wildcards. One that matches none is an error at
            ``fit``. Give the same to the quantization.
        weight_bits: 7 by default with rounded inputs, which is what int8 engines use on a CPU without VNNI; else what
            the scheme's name says.
        activation_bits: Of the inputs, 8 by default.

    Raises:
        ValueError: An argument is not one of those.
        TypeError: An argument is of the wrong kind.
        MisconfigurationException: At ``fit``: a strategy other than one device and DDP, or a share of a fit whose
            length is not known.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> aware = QuantizationAwareTraining(start=0.5)
        >>> trainer = Trainer(callbacks=aware, accelerator="cpu", max_epochs=2, limit_train_batches=4, barebones=True)
        >>> trainer.fit(BoringModel())
        >>> aware.layers, list(aware.ranges)
        (('layer',), ['layer'])
    """

    def __init__(
        self,
        scheme: str = "static-int8",
        start: int | float = 0.8,
        freeze_ranges: int | float = 0.95,
        unit: str = "step",
        in_validation: bool = False,
        skip: list[str] | None = None,
        weight_bits: int | None = None,
        activation_bits: int | None = None,
    ) -> None:
        super().__init__()
        check_fake_scheme(scheme, weight_bits, activation_bits)
        if unit not in ("step", "epoch"):
            raise ValueError(f"unit={unit!r} is unknown; use 'step' (an optimizer step) or 'epoch'.")
        for name, value in (("start", start), ("freeze_ranges", freeze_ranges)):
            _check_point(name, value, unit)
        if type(start) is type(freeze_ranges) and freeze_ranges < start:
            raise ValueError(f"freeze_ranges={freeze_ranges!r} is before start={start!r}; no range would be learnt.")
        self.scheme, self.unit, self.in_validation = scheme, unit, in_validation
        self.start, self.freeze_ranges = start, freeze_ranges
        self.skip = check_names("skip", skip)
        self.weight_bits, self.activation_bits = weight_bits, activation_bits
        self._fake: FakeQuantization | None = None
        self._removed, self._has_begun = True, False
        self._restored: dict[str, Tensor] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that are rounded; none before the start."""
        return () if self._fake is None else self._fake.layers

    @property
    def skipped(self) -> dict[str, str]:
        """Why each other layer with a weight is not rounded."""
        return {} if self._fake is None else dict(self._fake.skipped)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest input of each layer, as a running average; of ``"static-int8"`` only."""
        return {} if self._fake is None else self._fake.ranges

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        if not plain or isinstance(trainer.strategy, (DeepSpeedStrategy, XLAStrategy)):  # DDPStrategies by class only
            raise MisconfigurationException(
                f"QuantizationAwareTraining does not work with {type(trainer.strategy).__name__}: it supports one "
                "device and DDP, where each process has whole weights. Remove the callback."
            )
        self._remove()
        self._fake, self._restored, self._has_begun = None, {}, False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_begun = True
        if any(isinstance(value, float) for value in (self.start, self.freeze_ranges)):
            _shares_done(trainer, 0)  # raises now rather than later
        check_skip(pl_module, self.skip)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_past(self.start, trainer, batch_idx, at_the_latest=True):
            return
        if self._fake is None:
            self._begin(trainer, pl_module)
        assert self._fake is not None
        self._fake.switch_on(observe=not (self._fake.ranges and self._is_past(self.freeze_ranges, trainer, batch_idx)))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fake is None:
            return
        self._fake.switch_off()
        if self._fake.observes:
            self._fake.update(_maximum_over_ranks(trainer))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.in_validation and self._fake is not None and trainer.state.fn == TrainerFn.FITTING:
            self._fake.switch_on(observe=False)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fake is not None:
            self._fake.switch_off()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fake is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"QuantizationAwareTraining never started, and the model was trained in float: {self._why(trainer)}"
            )
        self._remove()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._has_begun and not is_trial_run(trainer):
            rank_zero_warn(f"QuantizationAwareTraining did nothing: no batch was trained ({why_untrained(trainer)}).")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ranges": self._restored if self._fake is None else self._fake.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict["ranges"])

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fake = FakeQuantization(
            pl_module,
            self.scheme,
            skip=self.skip,
            weight_bits=self.weight_bits,
            activation_bits=self.activation_bits,
        )
        self._removed = False
        self._fake.load_state_dict(self._restored)
        where = f"from step {trainer.global_step} on"
        if not self._fake.layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._fake.skipped.items()) or "it has none"
            rank_zero_warn(f"QuantizationAwareTraining finds no layer to round ({why}), and does nothing.")
        else:
            left = ", ".join(self._fake.skipped)
            rank_zero_info(
                f"QuantizationAwareTraining: {len(self._fake.layers)} layers are rounded {where} ({self.scheme})"
                f"{f'; left in float: {left}' if left else ''}."
            )

    def _remove(self) -> None:
        if self._fake is not None and not self._removed:
            self._fake.remove()
            self._removed = True

    def _is_past(self, point: int | float, trainer: pl.Trainer, batch_idx: int, *, at_the_latest: bool = False) -> bool:
        if isinstance(point, float):
            shares = _shares_done(trainer, batch_idx)
            return any(
                done >= (min(point, last) if at_the_latest and point < 1 and last else point) - 1e-9
                for done, last in shares
            )
        return (trainer.global_step if self.unit == "step" else trainer.current_epoch) >= point

    def _why(self, trainer: pl.Trainer) -> str:
        """Why rounding has not started in a fit that is over."""
        had = f"this fit had {trainer.global_step} optimizer steps in {trainer.current_epoch} epochs"
        if not isinstance(self.start, float):
            return f"start={self.start} {self.unit}s lie beyond its end ({had}). Choose an earlier start, or a share."
        if self.start == 1:
            return "start=1.0 is its end. Choose a smaller share of the fit."
        return (
            f"start={self.start} is a share of max_epochs or max_steps, and it ended before that ({had}). A share "
            "needs a fit of 2 optimizer steps or more, which is not stopped early."
        )


def _shares_done(trainer: pl.Trainer, batch_idx: int) -> list[tuple[float, float]]:
    """How much of the fit is done before this batch, and before its last optimizer step, by each of its ends."""
    shares = []
    if trainer.max_steps > 0:
        shares.append((trainer.global_step / trainer.max_steps, 1 - 1 / trainer.max_steps))
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        batches = float(trainer.num_training_batches)
        known = 0 < batches < float("inf")
        in_epoch = batch_idx / batches if known else 0.0
        step = min(trainer.accumulate_grad_batches, batches) / batches if known else 1.0
        shares.append(((trainer.current_epoch + in_epoch) / trainer.max_epochs, 1 - step / trainer.max_epochs))
    if not shares:
        raise MisconfigurationException(
            "start and freeze_ranges of QuantizationAwareTraining are shares of the fit, and its length is not known. "
            "Give the Trainer max_epochs or max_steps, or both arguments as whole numbers of steps or epochs."
        )
    return shares


def _maximum_over_ranks(trainer: pl.Trainer) -> Callable[[Tensor], Tensor] | None:
    if trainer.world_size == 1:
        return None
    reduce: Any = trainer.strategy.reduce  # whose signature names the mean and the sum only
    return lambda values: reduce(values, reduce_op="max")


def _check_point(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a share of the fit or a whole number of {unit}s, got {value!r}.")
    if not (0 <= value <= 1 if isinstance(value, float) else value >= 0):
        raise ValueError(
            f"{name}={value!r} is not allowed; it is a whole number of {unit}s from 0 on, or a share of the fit: a "
            "float from 0.0 to 1.0."
        )
