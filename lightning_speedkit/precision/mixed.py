"""Mixed precision whose autocast and gradient scaler follow the device that the run is really on.

What it does: the same as ``Trainer(precision="bf16-mixed")`` and ``"16-mixed"`` (weights in float32, matrix products
and convolutions in 16 bits, for fp16 a gradient scaler), bit for bit, and repairs four things of Lightning 2.6:

- Lightning takes the device from the *spelling* of the accelerator argument, so ``accelerator=CPUAccelerator()``
  gets an autocast for CUDA, which leaves the forward pass in float32. Here the strategy's device decides.
- ``"bf16-mixed"`` with a fused optimizer and gradient clipping raises, though bf16 has no scaler that could be in the
  way (Lightning #21435). Here it clips.
- A step that the fp16 scaler skips because of an overflow still moves a learning rate scheduled by steps (Lightning
  #5558), so that a warm-up is partly over before the first update. Here the schedule waits; ``skipped_steps`` counts.
- A checkpoint resumed under another precision loses or starts a scaler in silence. Here a warning says so.

A loss scale that collapses, which means that no step is taken any more, is told and ends the run, and LBFGS, whose
closure cannot be scaled, is refused at the start.

When it helps: on devices that compute in 16 bits natively; :func:`~lightning_speedkit.precision.fastest_precision`
says which. What it costs: the rounding of 16 bits, and for fp16 the first steps, which the scaler skips until it has
found its scale.

Sources: ``torch.amp``; Micikevicius et al., Mixed Precision Training, 2018; Lightning #5558, #21435, #21425.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from numbers import Integral, Real
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure import read_hardware
from lightning_speedkit.precision.loss_scale import LossScaleWatch

__all__ = ["SpeedkitMixedPrecision"]


class SpeedkitMixedPrecision(MixedPrecision):
    """Automatic mixed precision on whatever device the Trainer uses; ``Trainer(plugins=[SpeedkitMixedPrecision()])``.

    ``device`` is the type of the device that the run is on. It is set when the strategy sets the model up; before the
    first run it is the one that ``accelerator="auto"`` would use. fp16 also runs on a CPU, slowly: good for tests.
    ``skipped_steps`` is how many optimizer steps the scaler has skipped so far; the Trainer's ``global_step`` counts
    them as steps.

    An object that is used in a second fit or Trainer goes on with its loss scale, as Lightning's own plugin does, and
    with its ``skipped_steps``, unless a checkpoint brings another scale. Make a new object to start anew.

    A checkpoint holds the state of the scaler under the name of this class; the one that Lightning's own
    ``MixedPrecision`` wrote is read as well.

    Args:
        precision: ``"bf16-mixed"`` (bfloat16, no scaler) or ``"16-mixed"`` (float16 with a gradient scaler).
        initial_scale: The scaler's first loss scale, for ``"16-mixed"`` only; 65536 if not given. A smaller one skips
            fewer steps at the start.
        growth_interval: Steps without an overflow after which the scale doubles, for ``"16-mixed"`` only; 2000 if not
            given.
        smallest_scale: A loss scale that falls below this one has collapsed, which brings a warning, for
            ``"16-mixed"`` only; 1.0 if not given.
        max_skipped_in_a_row: More skipped steps than this one after the other end the run once the scale has
            collapsed, for ``"16-mixed"`` only; 50 if not given.

    Raises:
        ValueError: If ``precision`` is none of the two, or a number of the scaler is out of range or has no effect.
        TypeError: If one of those is no number, or one that counts steps no whole one.
        MisconfigurationException: At the start of a run: LBFGS, or a device without a gradient scaler, under
            ``"16-mixed"``.
        DivergenceError: During ``fit``: the loss scale has collapsed and does not recover.

    >>> plugin = SpeedkitMixedPrecision("bf16-mixed")
    >>> trainer = pl.Trainer(accelerator="cpu", plugins=[plugin], logger=False, enable_checkpointing=False)
    >>> trainer.precision, plugin.scaler
    ('bf16-mixed', None)
    """

    def __init__(
        self,
        precision: Literal["bf16-mixed", "16-mixed"] = "bf16-mixed",
        initial_scale: float | None = None,
        growth_interval: int | None = None,
        smallest_scale: float | None = None,
        max_skipped_in_a_row: int | None = None,
    ) -> None:
        if precision not in ("bf16-mixed", "16-mixed"):
            raise ValueError(
                f"precision={precision!r} is no mixed precision; use 'bf16-mixed' or '16-mixed'. "
                f"Full precision is Trainer(precision='32-true'), without this plugin."
            )
        of_the_scaler = {
            "initial_scale": initial_scale,
            "growth_interval": growth_interval,
            "smallest_scale": smallest_scale,
            "max_skipped_in_a_row": max_skipped_in_a_row,
        }
        given = [name for name, value in of_the_scaler.items() if value is not None]
        if precision == "bf16-mixed" and given:
            raise ValueError(
                f"What belongs to the gradient scaler was given ({', '.join(given)}), which 'bf16-mixed' does not "
                f"have. Leave it out, or use precision='16-mixed'."
            )
        _check_number("initial_scale", initial_scale, Real, "a positive number, for example 65536.0")
        _check_number("growth_interval", growth_interval, Integral, "a number of steps, for example 2000")
        _check_number("smallest_scale", smallest_scale, Real, "a positive number, for example 1.0")
        _check_number("max_skipped_in_a_row", max_skipped_in_a_row, Integral, "a number of steps, for example 50")
        self._initial_scale = 65536.0 if initial_scale is None else float(initial_scale)
        self._growth_interval = 2000 if growth_interval is None else int(growth_interval)
        self.skipped_steps = 0
        self._watch = LossScaleWatch(
            1.0 if smallest_scale is None else float(smallest_scale),
            50 if max_skipped_in_a_row is None else int(max_skipped_in_a_row),
        )
        self._held: list[tuple[LRSchedulerConfig, int]] = []
        device = _best_device_type()
        super().__init__(precision, device, self._new_scaler(device) if precision == "16-mixed" else None)

    @override
    def convert_module(self, module: Module) -> Module:
        # The strategy calls this before it wraps the model, once per run, and before any scaler state is restored.
        if isinstance(module, pl.LightningModule):
            self._follow(module.trainer.strategy.root_device)
            self._watch.start()
        return super().convert_module(module)

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            self._refuse_repeats(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        self._release_schedules()
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self._refuse_repeats(optimizer)
        losses, stepped = [], []  # what the closure and the optimizer's step leave as a trace

        def noting_closure() -> Any:
            losses.append(closure())
            return losses[-1]

        # A fused step runs in any case and skips on the device, and a step calls its hooks only where torch's own
        # Optimizer.__init__ has run: elsewhere only the scale tells, at the price of waiting for the device.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        by_scale = fused or not getattr(getattr(type(optimizer), "step", None), "hooked", False)
        scale = self.scaler.get_scale() if by_scale else 0.0
        with nullcontext() if by_scale else optimizer.register_step_post_hook(lambda *_: stepped.append(True)):
            result = super().optimizer_step(optimizer, model=model, closure=noting_closure, **kwargs)
        attempted = losses[-1] is not None or not model.automatic_optimization
        if attempted and (self.scaler.get_scale() < scale if by_scale else not stepped):
            self.skipped_steps += 1
            if model.automatic_optimization:
                self._hold_schedules(model.trainer)
            self._watch.see_skip(self.scaler.get_scale())
        elif attempted:
            self._watch.see_step()
        return result

    @override
    def teardown(self) -> None:
        self._release_schedules()
        super().teardown()

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.scaler is not None and clip_val > 0 and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} is fused and unscales the gradients inside its step, so that under "
                f"'16-mixed' they cannot be clipped before it. Build the optimizer with fused=False, "
                f"or use precision 'bf16-mixed', or leave gradient_clip_val out."
            )
        # MixedPrecision's own method refuses fused optimizers without asking whether there is a scaler (#21435).
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own, lightning_s = type(self).__qualname__, MixedPrecision.__qualname__
        found = own if own in checkpoint else lightning_s if lightning_s in checkpoint else None
        if self.scaler is None and found is not None:
            rank_zero_warn(
                "The checkpoint was written under '16-mixed' and holds a loss scale, "
                "which this run under 'bf16-mixed' does not need: it is dropped."
            )
        elif self.scaler is not None and found is None:
            rank_zero_warn(
                f"The checkpoint was not written under '16-mixed' and holds no loss scale: "
                f"the scaler starts at {self._initial_scale:g}, and the first steps may be skipped."
            )
        elif found == lightning_s:  # Lightning itself then loads what is under our own name
            self.load_state_dict(checkpoint[found])

    def _hold_schedules(self, trainer: pl.Trainer) -> None:
        # Lightning asks after each step whether the batch is a multiple of the frequency; of this one it is not.
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                self._held.append((config, config.frequency))
                config.frequency = sys.maxsize

    def _release_schedules(self) -> None:
        for config, frequency in self._held:
            config.frequency = frequency
        self._held = []

    def _follow(self, device: torch.device) -> None:
        if self.precision == "bf16-mixed" and device.type == "cuda" and _emulates_bf16():
            rank_zero_warn(
                f"{torch.cuda.get_device_name(device)} computes bfloat16 by emulation, which costs time. "
                f"Use '16-mixed' here; fastest_precision() tells."
            )
        elif self.precision == "bf16-mixed" and device.type == "cpu" and not read_hardware("cpu").native_bf16:
            rank_zero_warn(
                "This CPU has no instructions for bfloat16 (AVX512_BF16, AMX or Arm's BF16): it computes it by "
                "emulation, which costs time. Use '32-true' here; fastest_precision() tells."
            )
        if device.type != self.device:
            self.device = device.type
            if self.scaler is not None:
                before, self.scaler = self.scaler, self._new_scaler(device.type)
                self.scaler.load_state_dict(before.state_dict())
        if self.scaler is not None and not self.scaler.is_enabled():
            raise MisconfigurationException(
                f"'16-mixed' needs a gradient scaler, and torch {torch.__version__} has none for {device.type!r} here: "
                f"small gradients would be lost without a word. Use 'bf16-mixed' or '32-true'."
            )

    def _refuse_repeats(self, optimizer: Any) -> None:
        if self.scaler is not None and isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
            raise MisconfigurationException(
                "LBFGS evaluates its closure several times per step, and a gradient scaler unscales once: '16-mixed' "
                "cannot train with it. Use 'bf16-mixed' or '32-true', or another optimizer."
            )

    def _new_scaler(self, device_type: str) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device_type, init_scale=self._initial_scale, growth_interval=self._growth_interval)


def _check_number(name: str, value: Any, kind: type[Any], allowed: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {allowed}; got {type(value).__name__}.")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be {allowed}.")


def _best_device_type() -> str:
    # Lightning's accelerators ask without creating a CUDA context, so that processes can still be forked.
    if CUDAAccelerator.is_available():
        return "cuda"
    return "mps" if MPSAccelerator.is_available() else "cpu"


def _emulates_bf16() -> bool:
    return not torch.cuda.is_bf16_supported(including_emulation=False)
