"""Gradient clipping with the threshold of your choice, at the one moment at which it is right.

What it does: it cuts gradients down by their common norm, by value, or unit by unit (AGC), with a fixed threshold or
one that follows the run (ZClip, a percentile). It happens once per accumulation window, after gradients are unscaled
and synchronised and after every callback has looked at them, before the optimizer steps. The norms before and after
are logged.

When it helps: rare gradients that are far larger than the others and would undo what was learnt. What it costs: one
pass over the gradients for the norm and one for the multiplication, as Lightning's own; no norm is read on the host,
and without a gradient scaler no hook is called per batch.

How: during ``fit`` it takes the place of the precision plugin's ``clip_gradients``, which Lightning calls at that
moment. So it also works where Lightning's raises: with fused optimizers under bf16 (Lightning #21435), whose
gradients are not scaled, and under fp16, where the threshold is scaled instead.

The arithmetic is in ``clip_gradients.py``, the thresholds that follow the run are in ``clip_thresholds.py``; their
sources are named there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.measure.lightning_hooks import BATCH_HOOKS, call_hooks, leave_logged, pass_over_hooks
from lightning_speedkit.measure.lightning_internals import logs_this_step
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.optimize.clip_gradients import clip_by_norm, clip_by_value, clip_units, gradient_norm, spoil
from lightning_speedkit.optimize.clip_thresholds import PercentileLimit, ZScoreLimit
from lightning_speedkit.optimize.optimizer_options import checked_number
from lightning_speedkit.optimize.skipped_steps_refusals import checked_limit

__all__ = ["GradientClipping"]


_LOGGED = ("gradient_norm", "gradient_norm_clipped")
_DEFAULT_LIMITS = {"norm": 1.0, "value": 1.0, "agc": 0.01, "zclip": 2.5, "percentile": 10.0}
_OPTIONS = {"smoothing": "zclip", "warmup": "zclip", "history": "percentile"}


class GradientClipping(OneOfAKind):
    """Clips gradients once per optimizer step, and logs ``gradient_norm`` and ``gradient_norm_clipped``.

    Both are logged with ``self.log`` at the Trainer's ``log_every_n_steps``. Skipped steps (see
    :class:`NonFiniteGuard`) are neither clipped nor counted.

    Args:
        by: What is held down. ``"norm"``: the common norm of all gradients. ``"value"``: each element. ``"agc"``: the
            gradient of each unit, against the weights of that unit. ``"zclip"``: norms far above the mean of the run.
            ``"percentile"``: norms above a percentile of those of the run.
        limit: The largest norm (1.0), value (1.0), ratio of gradient to weights (0.01), score (2.5), or the percentile
            (10; from 1 to 100); in brackets what it is if not given. ``float("inf")``, but for a percentile, clips
            nothing and logs.
        smoothing: For ``"zclip"``: the weight of the old mean and variance; 0.97 if not given.
        warmup: For ``"zclip"``: steps before it clips; 25 if not given.
        history: For ``"percentile"``: how many norms are kept; 1000 if not given.

    Raises:
        ValueError: ``by`` is unknown, a number is out of its range, or one has no effect.
        TypeError: A number is none.
        MisconfigurationException: At ``fit``: manual optimization, ``Trainer(gradient_clip_val=...)``, a second
            ``GradientClipping``, a module with its own ``configure_gradient_clipping``, DeepSpeed, or FSDP of the
            first version, whose gradients are flat shards.
        ValueError: During ``fit``, with ``"agc"``: a sparse gradient that has no whole rows.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Watched(BoringModel):
        ...     def on_train_batch_end(self, *arguments):
        ...         self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        >>> model, short = Watched(), {"max_steps": 3, "limit_val_batches": 0, "barebones": True}
        >>> trainer = Trainer(callbacks=GradientClipping(limit=0.01), accelerator="cpu", **short)
        >>> trainer.fit(model)
        >>> round(model.norm.item(), 4)
        0.01
    """

    def __init__(
        self,
        by: str = "norm",
        limit: float | None = None,
        smoothing: float | None = None,
        warmup: int | None = None,
        history: int | None = None,
    ) -> None:
        super().__init__()
        if by not in _DEFAULT_LIMITS:
            hint = did_you_mean(by, _DEFAULT_LIMITS) if isinstance(by, str) else f" The threshold is limit={by!r}."
            raise ValueError(f"by={by!r} is unknown.{hint} Use one of: {', '.join(_DEFAULT_LIMITS)}.")
        for name, given in (("smoothing", smoothing), ("warmup", warmup), ("history", history)):
            if given is not None and by != _OPTIONS[name]:
                raise ValueError(f"{name}={given!r} belongs to by={_OPTIONS[name]!r} and has no effect with {by!r}.")
        self.by = by
        most = 100.0 if by == "percentile" else math.inf
        self.limit = _limit(_DEFAULT_LIMITS[by] if limit is None else limit, most)
        if by == "percentile" and self.limit < 1:
            raise ValueError(
                f"limit={limit!r} with by='percentile' would be less than the 1st of 100 percentiles. For a share of "
                f"{self.limit:g} write limit={100 * self.limit:g}."
            )
        self.smoothing = 0.97 if smoothing is None else checked_number("smoothing", smoothing, 0.0, 1.0, above=True)
        self.warmup = 25 if warmup is None else checked_limit("warmup", warmup)
        self.history = 1000 if history is None else checked_limit("history", history)
        self._follow: ZScoreLimit | PercentileLimit | None = None
        if by == "zclip":
            self._follow = ZScoreLimit(self.limit, self.smoothing, self.warmup)
        elif by == "percentile":
            self._follow = PercentileLimit(self.limit, self.history)
        self._plugin: Any = None  # whose clip_gradients is ours for now
        self._has_logged = False  # in the last step
        self._has_scaler = False
        self._had_backward = False  # the batch in progress, under a scaler

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            _refuse(trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def clip_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._clip(trainer, pl_module, optimizer)

        self._put_back()
        self._plugin = trainer.precision_plugin
        self._plugin.clip_gradients = clip_gradients
        self._has_scaler = getattr(self._plugin, "scaler", None) is not None
        needed = {"on_train_batch_start", "on_before_backward"} if self._has_scaler else set()
        pass_over_hooks(trainer, self, GradientClipping, *(name for name in BATCH_HOOKS if name not in needed))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._had_backward = False

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._had_backward = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._follow is None else self._follow.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._follow is not None and state_dict.keys() == self._follow.state_dict().keys():
            self._follow.load_state_dict(state_dict)
        elif self._follow is not None:
            rank_zero_warn(f"The checkpoint was saved with another by: the threshold of by={self.by!r} begins anew.")

    def _put_back(self) -> None:
        call_hooks(self, *BATCH_HOOKS)
        if self._plugin is not None:
            vars(self._plugin).pop("clip_gradients", None)
            self._plugin = None

    def _clip(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters or (self._has_scaler and not self._had_backward):  # then Lightning takes no step
            return
        scale = _remaining_scale(trainer, optimizer, parameters) if self._has_scaler else 1.0
        logs = logs_this_step(trainer)
        by_norm = self.by not in ("value", "agc")
        norm = _unscaled(gradient_norm(parameters), scale) if by_norm or logs else None
        factor = None
        if norm is not None and by_norm:
            factor = clip_by_norm(parameters, self.limit if self._follow is None else self._follow(norm), norm)
        elif self.by == "agc":
            clip_units(parameters, self.limit * scale)
        else:
            if isinstance(scale, Tensor):
                spoil(parameters)
            clip_by_value(parameters, self.limit * scale)
        if self._has_logged and not logs:
            leave_logged(trainer, *_LOGGED)
        self._has_logged = logs
        if norm is not None and logs:
            after = _unscaled(gradient_norm(parameters), scale) if factor is None else norm * factor
            for name, value in zip(_LOGGED, (norm, after), strict=True):
                pl_module.log(name, value)


def _remaining_scale(
    trainer: pl.Trainer, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> float | Tensor:
    """What gradients are still multiplied by: a fused optimizer takes the loss scale off inside its own step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    scale: Tensor = scaler.scale(torch.ones((), device=parameters[0].device))  # get_scale() would wait for the device
    return scale


def _unscaled(norm: Tensor, scale: float | Tensor) -> Tensor:
    return norm / scale if isinstance(scale, Tensor) else norm


def _limit(value: Any, most: float) -> float:
    is_none = type(value) is float and value == most == math.inf  # no limit, in the words of the caller
    return math.inf if is_none else checked_number("limit", value, 0.0, most, above=True)


def _refuse(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Raise if this Trainer and module cannot be clipped in the way of this file."""
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"GradientClipping works with automatic optimization, and {name} sets automatic_optimization = False. "
            "Remove the callback, and call clip_by_norm of lightning_speedkit.optimize before your optimizer steps."
        )
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and GradientClipping set the same thing. "
            "Remove one of them."
        )
    if sum(isinstance(c, GradientClipping) for c in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        raise MisconfigurationException("Two GradientClipping callbacks set the same thing. Keep one of them.")
    if is_overridden("configure_gradient_clipping", pl_module):
        raise MisconfigurationException(
            f"{name} clips by its own configure_gradient_clipping, and GradientClipping sets the same thing. Remove "
            "one of them."
        )
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise MisconfigurationException(
            f"GradientClipping does not work with {type(trainer.strategy).__name__}, which keeps gradients in a form "
            "of its own. Use ModelParallelStrategy (FSDP2), or remove the callback and set "
            "Trainer(gradient_clip_val=...) if the strategy takes it."
        )
