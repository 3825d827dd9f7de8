"""The return value of ``configure_optimizers`` in one line: an optimizer and a schedule by name.

What it does: builds both, and counts the steps of the run that the module is in, with accumulation, ``max_steps`` and
several devices. When it helps: a schedule that is too long never falls, one that is too short trains at a rate of 0;
both happen when batches are counted. What it costs: the training loader is made before the optimizer, since its length
is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from lightning_speedkit.optimize.optimizer import build_optimizer, named_optimizer
from lightning_speedkit.optimize.schedule import PLATEAU, build_schedule, is_endless
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch

__all__ = ["fitting_options", "optimizers_for", "schedule_for", "total_steps_of"]


def optimizers_for(
    module: pl.LightningModule,
    optimizer: str = "adamw",
    schedule: str | None = None,
    *,
    lr: float,
    weight_decay: float | None = None,
    monitor: str = "val_loss",
    optimizer_settings: Mapping[str, Any] | None = None,
    schedule_settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``configure_optimizers`` returns: ``return optimizers_for(self, "adamw", "warmup-cosine", lr=1e-3)``.

    The schedule steps with the optimizer, so its length is the number of optimizer steps of this fit.

    Args:
        module: The module, in a fit; or on its own, if no schedule needs the number of steps.
        optimizer: A name that :func:`~lightning_speedkit.optimize.optimizer.build_optimizer` knows.
        schedule: A name that :func:`~lightning_speedkit.optimize.schedule.build_schedule` knows, or none.
        lr: The peak learning rate.
        weight_decay: Of weights; ``None`` takes the optimizer's default.
        monitor: The metric that ``"reduce-on-plateau"`` follows.
        optimizer_settings: Further arguments of ``build_optimizer``, for example ``{"layer_decay": 0.75}``.
        schedule_settings: Further arguments of ``build_schedule``, for example ``{"warmup": 500}``.

    Raises:
        ValueError: A name, an option or a number is not allowed.
        MisconfigurationException: The number of steps cannot be known, a schedule is asked for with manual
            optimization or with ``"schedule-free"``, or that has no callback that switches it.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> class Model(BoringModel):
    ...     def configure_optimizers(self):
    ...         return optimizers_for(self, "adamw", "linear", lr=0.1)
    >>> trainer = pl.Trainer(max_steps=3, accumulate_grad_batches=2, accelerator="cpu", barebones=True)
    >>> trainer.fit(Model())
    >>> trainer.lr_scheduler_configs[0].scheduler.get_last_lr()  # weight and bias
    [0.0, 0.0]
    """
    settings = dict(optimizer_settings or {})
    trainer = _trainer_of(module)
    if trainer is not None:
        settings["options"] = fitting_options(trainer, optimizer, settings.get("options"))
    built = build_optimizer(optimizer, module, lr, weight_decay, **settings)
    if isinstance(built, ScheduleFreeAdamW) and trainer is not None and not _has_switch(trainer):
        raise MisconfigurationException(
            "The optimizer 'schedule-free' validates and saves other weights than it trains with. Add "
            "ScheduleFreeSwitch() to the callbacks of the Trainer."
        )
    if schedule is None:
        return {"optimizer": built}
    return {"optimizer": built, "lr_scheduler": schedule_for(module, built, schedule, monitor, schedule_settings)}


def schedule_for(
    module: pl.LightningModule,
    optimizer: Optimizer,
    schedule: str,
    monitor: str = "val_loss",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``"lr_scheduler"`` of what ``configure_optimizers`` returns, for an optimizer of your own.

    Raises:
        ValueError, MisconfigurationException: As :func:`optimizers_for`.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> optimizer = build_optimizer("adamw", module := BoringModel(), lr=0.1)
    >>> found = schedule_for(module, optimizer, "linear", settings={"total_steps": 10})
    >>> found["interval"], found["frequency"]
    ('step', 1)
    """
    settings = dict(settings or {})
    if isinstance(optimizer, ScheduleFreeAdamW) and schedule != "constant":
        raise MisconfigurationException(
            f"Two schedules at once: {schedule!r}, and 'schedule-free', which stands for one. Use only one of them."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization = False, and Lightning then steps no schedule. Build "
            "it by build_schedule(), and call its step() in training_step."
        )
    if schedule == PLATEAU:
        found = build_schedule(schedule, optimizer, **settings)
        return {"scheduler": found, "interval": "epoch", "monitor": monitor, **_after_validation(_trainer_of(module))}
    if "total_steps" not in settings and not is_endless(schedule, settings.get("warmup")):
        settings["total_steps"] = total_steps_of(module)
    return {"scheduler": build_schedule(schedule, optimizer, **settings), "interval": "step", "frequency": 1}


def _after_validation(trainer: pl.Trainer | None) -> dict[str, Any]:
    """When Lightning is to look at a metric: in the epochs that validate, since it keeps the last value between them.

    Where validations are counted in batches (``check_val_every_n_epoch=None``), the first epochs may have none: then
    there is no metric yet, which is no error.
    """
    if trainer is None or not trainer.enable_validation:
        return {"frequency": 1}
    every = trainer.check_val_every_n_epoch
    return {"frequency": 1, "strict": False} if every is None else {"frequency": every}


def total_steps_of(module: pl.LightningModule) -> int:
    """How many optimizer steps the fit takes that the module is in.

    Raises:
        MisconfigurationException: There is no fit, or no end of it.
    """
    trainer = _trainer_of(module)
    steps = math.inf if trainer is None else trainer.estimated_stepping_batches
    if steps == math.inf or steps < 1:  # -1 is what Lightning says of a stream without a length
        why = f"{type(module).__name__} is in no Trainer" if trainer is None else "the Trainer knows no end of the run"
        raise MisconfigurationException(
            f"The schedule needs the number of optimizer steps, and {why}. Set Trainer(max_steps=...), give "
            "total_steps in the settings of the schedule, or take 'inverse-sqrt' with a warmup in steps."
        )
    return int(steps)


def fitting_options(trainer: pl.Trainer, name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, with ``fused=False`` added where a fused step would get in the way of this Trainer.

    With a gradient scaler a fused optimizer unscales inside its step, so whatever looks at the gradients before it sees
    them scaled; and Lightning refuses to clip for a fused optimizer under ``"bf16-mixed"`` too (Lightning #21435).
    """
    chosen = dict(options or {})
    precision = trainer.precision_plugin
    if isinstance(precision, MixedPrecision) and named_optimizer(name).fuses:
        refuses = bool(trainer.gradient_clip_val) and type(precision).clip_gradients is MixedPrecision.clip_gradients
        if precision.scaler is not None or refuses:
            chosen.setdefault("fused", False)
    return chosen


def _trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    try:
        found = module.trainer
    except RuntimeError:  # not attached
        return None
    return found if isinstance(found, pl.Trainer) else None  # Fabric puts a stand-in there


def _has_switch(trainer: pl.Trainer) -> bool:
    return any(isinstance(callback, ScheduleFreeSwitch) for callback in trainer.callbacks)  # type: ignore[attr-defined]
