"""The return value of ``configure_optimizers`` in one line: an optimizer and a schedule by name.

What it does: builds both, and counts the steps of the run that the module is in, with accumulation, ``max_steps`` and
several devices. When it helps: a schedule that is too long never falls, one that is too short trains at a rate of 0;
both happen when batches are counted. What it costs: the training loader is made before the optimizer, since its length
is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import LBFGS, Optimizer

from lightning_speedkit.optimize.misplaced_arguments import names_options
from lightning_speedkit.optimize.offloaded_adamw import OFFLOADED, refuse_late_changes
from lightning_speedkit.optimize.optimizer import build_optimizer, named_optimizer, optimizer_option_names
from lightning_speedkit.optimize.optimizer_options import unknown_name
from lightning_speedkit.optimize.schedule import PLATEAU, build_schedule, is_endless
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch

__all__ = ["fitting_options", "optimizers_for", "schedule_for", "total_steps_of"]

_OF_OPTIMIZER = ("layer_decay", "layers", "decay_all", "options")
_OF_SCHEDULE = ("warmup", "final", "frequency", "total_steps", "options")


@names_options("optimizers_for(..., optimizer_settings={'options': {'NAME': ...}})", optimizer_option_names)
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
        ValueError: A name, a setting, an option or a number is not allowed.
        TypeError: An argument is of the wrong kind.
        MisconfigurationException: The number of steps cannot be known, a schedule is asked for with manual
            optimization, with ``"schedule-free"`` or for LBFGS under float16, or ``"schedule-free"`` has no callback
            that switches it.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> class Model(BoringModel):
    ...     def configure_optimizers(self):
    ...         return optimizers_for(self, "adamw", "linear", lr=0.1)
    >>> trainer = pl.Trainer(max_steps=3, accumulate_grad_batches=2, accelerator="cpu", barebones=True)
    >>> trainer.fit(Model())
    >>> trainer.lr_scheduler_configs[0].scheduler.get_last_lr()  # weight and bias
    [0.0, 0.0]
    """
    settings = _checked_settings("optimizer", optimizer_settings, _OF_OPTIMIZER)
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

    If the fit ends before the rise does, a warning says so.

    Raises:
        ValueError, TypeError, MisconfigurationException: As :func:`optimizers_for`.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> optimizer = build_optimizer("adamw", module := BoringModel(), lr=0.1)
    >>> found = schedule_for(module, optimizer, "linear", settings={"total_steps": 10})
    >>> found["interval"], found["frequency"]
    ('step', 1)
    """
    settings = _checked_settings("schedule", settings, _OF_SCHEDULE)
    if isinstance(optimizer, ScheduleFreeAdamW) and schedule != "constant":
        raise MisconfigurationException(
            f"Two schedules at once: {schedule!r}, and 'schedule-free', which stands for one. Use only one of them."
        )
    trainer = _trainer_of(module)
    if isinstance(optimizer, LBFGS) and trainer is not None:
        _refuse_scaler(trainer)
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization = False, and Lightning then steps no schedule. Build "
            "it by build_schedule(), and call its step() in training_step."
        )
    if schedule == PLATEAU:
        found = build_schedule(schedule, optimizer, **settings)
        return {"scheduler": found, "interval": "epoch", "monitor": monitor, **_after_validation(trainer)}
    if settings.get("total_steps") is None and not is_endless(schedule, settings.get("warmup")):
        settings["total_steps"] = _length(module, settings.get("warmup"))
    return {"scheduler": build_schedule(schedule, optimizer, **settings), "interval": "step", "frequency": 1}


def _refuse_scaler(trainer: pl.Trainer) -> None:
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise MisconfigurationException(
            f"LBFGS does not work with precision {trainer.precision!r}: it evaluates the loss several times per step, "
            "and the gradient scaler expects one. Use 'bf16-mixed' or '32-true', or another optimizer."
        )


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
    """How many optimizer steps the fit takes that the module is in; 1 for a fit that is to take none, ``max_steps=0``.

    Raises:
        MisconfigurationException: There is no fit, no end of it, or no batch in it.
    """
    trainer = _trainer_of(module)
    if trainer is None:
        raise MisconfigurationException(
            f"The schedule needs the number of optimizer steps, and {type(module).__name__} is in no Trainer that "
            "would know it. Build it in configure_optimizers, which a fit calls; or give total_steps, to "
            "optimizers_for as schedule_settings={'total_steps': ...}."
        )
    if trainer.max_steps == 0:
        return 1
    try:
        steps = trainer.estimated_stepping_batches
    except MisconfigurationException as error:  # of windows whose length depends on the batches
        raise MisconfigurationException(
            f"The schedule needs the number of optimizer steps. {error} Or give total_steps to the schedule."
        ) from error
    if 1 <= steps < math.inf:
        return int(steps)
    if steps == 0 or not trainer.limit_train_batches:
        raise MisconfigurationException(
            "The schedule needs the number of optimizer steps, and this fit takes 0: there are no training batches. "
            "Look at the training loader, and at limit_train_batches."
        )
    if steps == math.inf:
        why = f"the Trainer knows no end of the run (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps})"
    else:  # what Lightning says of a stream
        why = f"the training loader has no length, so max_epochs={trainer.max_epochs} does not say how many there are"
    raise MisconfigurationException(
        f"The schedule needs the number of optimizer steps, and {why}. Set Trainer(max_steps=...), give total_steps in "
        "the settings of the schedule, or take 'inverse-sqrt' or 'constant' with a warmup in steps."
    )


def _length(module: pl.LightningModule, warmup: Any) -> int:
    """The number of steps of the fit, or of the rise if that takes longer; then the fit is a part of the rise."""
    steps = total_steps_of(module)
    _warn_of_default_epochs(module, steps)
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup <= steps:
        return steps
    trainer = _trainer_of(module)
    if trainer is not None and not trainer.fast_dev_run and trainer.max_steps != 0:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"The learning rate rises over warmup={warmup} optimizer steps, and this fit takes {steps}: it never "
            "reaches its peak. Give fewer steps, or a share of the run such as warmup=0.05."
        )
    return warmup


def _warn_of_default_epochs(module: pl.LightningModule, steps: int) -> None:
    """Lightning's Trainer takes 1000 epochs where it is told nothing, and few runs last as long."""
    trainer = _trainer_of(module)
    if trainer is not None and trainer.max_epochs == 1000 and trainer.max_steps == -1:
        rank_zero_warn(
            f"The schedule is as long as max_epochs=1000, {steps} optimizer steps. That is what Lightning takes if it "
            "is not told: if the run ends earlier, the rate will not have fallen. Set Trainer(max_epochs=...), or give "
            "total_steps."
        )


def _checked_settings(what: str, settings: Mapping[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise TypeError(f"The settings of the {what} are a mapping, of {', '.join(known)}; got {settings!r}.")
    for key in settings:
        if key not in known:
            raise ValueError(
                f"{unknown_name(f'setting of the {what}', key, known)} What the {what} itself takes goes into options: "
                f"{{'options': {{{key!r}: ...}}}}."
            )
    return dict(settings)


def fitting_options(trainer: pl.Trainer, name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, with ``fused=False`` added where a fused step would get in the way of this Trainer.

    With a gradient scaler a fused optimizer unscales inside its step, so whatever looks at the gradients before it sees
    them scaled; and Lightning refuses to clip for a fused optimizer under ``"bf16-mixed"`` too (Lightning #21435).
    """
    chosen = dict(options or {})
    if name == OFFLOADED:
        refuse_late_changes(trainer)
    precision = trainer.precision_plugin
    if isinstance(precision, MixedPrecision) and named_optimizer(name).fuses:
        refuses = bool(trainer.gradient_clip_val) and type(precision).clip_gradients is MixedPrecision.clip_gradients
        if precision.scaler is not None or refuses:
            chosen.setdefault("fused", False)
    return chosen


def _trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    if not isinstance(module, pl.LightningModule):
        raise TypeError(
            f"A LightningModule is asked for, which knows its Trainer; got {type(module).__name__}. For another module "
            "use build_optimizer and build_schedule."
        )
    try:
        found = module.trainer
    except RuntimeError:  # not attached
        return None
    return found if isinstance(found, pl.Trainer) else None  # Fabric puts a stand-in there


def _has_switch(trainer: pl.Trainer) -> bool:
    return any(isinstance(callback, ScheduleFreeSwitch) for callback in trainer.callbacks)  # type: ignore[attr-defined]
