"""Another optimizer or schedule for a LightningModule that is not to be edited.

What it does: for one ``fit``, ``configure_optimizers`` of the module returns the optimizer and the schedule that these
callbacks name. Which parameters are trained stays the module's decision: those that its own optimizer holds. After the
fit the module is as it was. When it helps: to try, by a preset or a line of YAML, what a paper's module would do with
another optimizer. What it costs: the module's own optimizer is built too, and dropped before it has any state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure.lightning_internals import read_optimizers
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.measure.one_run import begin_run, is_in_another_run
from lightning_speedkit.optimize.misplaced_arguments import names_options
from lightning_speedkit.optimize.optimizer import build_from_settings, check_optimizer_options, optimizer_option_names
from lightning_speedkit.optimize.optimizer_groups import check_settings, parameter_settings
from lightning_speedkit.optimize.optimizer_options import checked_flag
from lightning_speedkit.optimize.optimizer_replacement import inherited_settings, without_schedules
from lightning_speedkit.optimize.optimizer_resume import Group, check_groups, check_name, saved_groups
from lightning_speedkit.optimize.optimizers_for import fitting_options, schedule_for
from lightning_speedkit.optimize.schedule import PLATEAU, check_schedule, schedule_option_names
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch

__all__ = ["OptimizerChoice", "ScheduleChoice"]

_Choice = TypeVar("_Choice", bound=Callback)


def _only(trainer: pl.Trainer, kind: type[_Choice]) -> _Choice | None:
    found = [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]
    if len(found) > 1:
        what = "optimizers" if kind is OptimizerChoice else "schedules"
        raise MisconfigurationException(
            f"Two {what} at once: there are {len(found)} {kind.__name__}. Keep one of them."
        )
    return found[0] if found else None


def _override(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[], None]:
    """Let ``configure_optimizers`` of the module answer as the callbacks say; returns what undoes it."""
    choice, schedule = _only(trainer, OptimizerChoice), _only(trainer, ScheduleChoice)
    own_configure = module.configure_optimizers
    found = vars(module).get("configure_optimizers")

    def configure_optimizers() -> dict[str, Any]:
        optimizers, schedules = read_optimizers(own_configure())
        if len(optimizers) != 1:
            raise MisconfigurationException(
                f"{type(module).__name__}.configure_optimizers returns {len(optimizers)} optimizers; another one can "
                "be chosen for exactly one. Remove the callback or preset."
            )
        schedulers = [given.get("scheduler") if isinstance(given, dict) else given for given in schedules]
        if schedulers and not (schedule and schedule.replace):
            lost = type(schedulers[0]).__name__
            raise MisconfigurationException(
                f"Two schedules at once: {type(module).__name__} has one of its own, {lost}, which belongs to its own "
                "optimizer. To put another in its place, add ScheduleChoice(..., replace=True), 'constant' for none; "
                "or remove one of them."
            )
        optimizer = without_schedules(optimizers[0], schedulers) if schedulers else optimizers[0]
        if choice is not None:
            optimizer = choice.optimizer_for(module, optimizer)
        if schedule is None:
            return {"optimizer": optimizer}
        return {"optimizer": optimizer, "lr_scheduler": schedule.schedule_for(module, optimizer)}

    def undo() -> None:
        if vars(module).get("configure_optimizers") is configure_optimizers:
            del module.configure_optimizers
            if found is not None:
                module.configure_optimizers = found  # type: ignore[method-assign]

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign, assignment]
    return undo


class _Configures(OneOfAKind):
    """Puts an answer in the place of ``configure_optimizers`` for one ``fit``, also after an exception.

    Where there are both callbacks, the one for the optimizer does it for both.
    """

    _undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        begin_run(self, trainer)
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self is (_only(trainer, OptimizerChoice) or _only(trainer, ScheduleChoice)):
            self._undo = _override(trainer, pl_module)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.training:
            choice = _only(trainer, OptimizerChoice)
            saved = checkpoint.get("callbacks", {}).get(OptimizerChoice.__qualname__, {}).get("optimizer")
            check_name(saved, None if choice is None else choice.optimizer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._undo is not None and not is_in_another_run(self, trainer):
            self._undo()
            self._undo = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.teardown(trainer, pl_module, "fit")


class OptimizerChoice(_Configures, ScheduleFreeSwitch):
    """Trains with the optimizer of that name, whatever ``configure_optimizers`` of the module returns.

    The parameters are those of the module's own optimizer. With ``"schedule-free"`` the callback also switches the
    weights, as :class:`~lightning_speedkit.optimize.schedule_free_switch.ScheduleFreeSwitch` does.

    Args:
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd-momentum"``, ``"adafactor"``, ``"muon"``, ``"adamw-8bit"``,
            ``"adamw-cpu-offload"`` or ``"schedule-free"``.
        lr: The learning rate; ``None`` keeps those of the module's own optimizer, if that is of the same kind.
        weight_decay: Of weights; ``None`` keeps the module's own, if its optimizer and its decay are of the same kind.
        layer_decay: Each layer's rate is that of the next layer towards the output times this.
        layers: The layers from input to output, as prefixes of parameter names, where they cannot be told.
        decay_all: Decay biases and norms too.
        options: Further arguments of the optimizer, for example ``{"betas": [0.9, 0.95]}``.

    Raises:
        ValueError: A name, an option or a number is not allowed.
        TypeError: An argument or an option is of the wrong kind.
        MisconfigurationException: At ``fit``: two of these callbacks, this object in a run that goes on around this
            one, a schedule that the module has of its own, several optimizers, a missing ``lr``, or a checkpoint of
            another optimizer.

    Example:

        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> choice = OptimizerChoice("adamw", lr=1e-3)
        >>> trainer = pl.Trainer(max_steps=1, accelerator="cpu", callbacks=choice, barebones=True)
        >>> trainer.fit(Model())
        >>> type(trainer.optimizers[0]).__name__
        'AdamW'
    """

    @names_options("OptimizerChoice(..., options={'NAME': ...})", optimizer_option_names)
    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float | None = None,
        layer_decay: float = 1.0,
        layers: list[str] | None = None,
        decay_all: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        given: Any = optimizer
        if isinstance(given, float):
            raise TypeError(f"The first argument is the name of the optimizer. For a rate write lr={optimizer!r}.")
        check_optimizer_options(optimizer, options)
        check_settings(
            0.0 if lr is None else lr, 0.0 if weight_decay is None else weight_decay, layer_decay, layers, decay_all
        )
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.layer_decay = layer_decay
        self.layers = None if layers is None else list(layers)
        self.decay_all = decay_all
        self.options = None if options is None else dict(options)
        self._saved: list[Group] | None = None  # of the optimizer in the checkpoint that is resumed

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._saved = saved_groups(checkpoint)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        saved, self._saved = self._saved, None
        if saved is not None:  # the state is restored after this hook
            check_groups(saved, trainer.optimizers[0], self.optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def optimizer_for(self, module: pl.LightningModule, own: Optimizer) -> Optimizer:
        """The chosen optimizer, for a module in a fit whose own optimizer is ``own``."""
        settings = parameter_settings(
            module,
            1.0 if self.lr is None else self.lr,
            1.0 if self.weight_decay is None else self.weight_decay,
            layer_decay=self.layer_decay,
            layers=self.layers,
            decay_all=self.decay_all,
        )
        options = fitting_options(module.trainer, self.optimizer, self.options)
        kept = {"lr": self.lr is None, "weight_decay": self.weight_decay is None}
        settings = inherited_settings(settings, module, own, self.optimizer, **kept, options=options)
        return build_from_settings(self.optimizer, module, settings, options)


class ScheduleChoice(_Configures):
    """Trains with the learning-rate schedule of that name; its peak is the rate of the optimizer.

    The optimizer is that of the module, or of an :class:`OptimizerChoice`. The schedule counts optimizer steps, and its
    length is that of the fit.

    Args:
        schedule: ``"warmup-cosine"``, ``"one-cycle"``, ``"linear"``, ``"warmup-stable-decay"``, ``"inverse-sqrt"``,
            ``"constant"`` or ``"reduce-on-plateau"``.
        warmup: The length of the rise, in steps (a whole number) or as a share of the run (below 1).
        final: What the peak rate is multiplied with at the end.
        monitor: The metric that ``"reduce-on-plateau"`` follows.
        replace: Replace a schedule that the module has of its own; it is an error otherwise.
        frequency: The rate changes every so many optimizer steps.
        total_steps: The length of the schedule, if it is not that of the fit.
        options: Of the schedule, for example ``{"decay": 0.1}`` or ``{"patience": 3}``.

    Raises:
        ValueError: A name, an option or a number is not allowed.
        TypeError: An argument or an option is of the wrong kind.
        MisconfigurationException: At ``fit``: two schedules, manual optimization, or no known end of the run.

    Example:

        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> schedule = ScheduleChoice("linear", warmup=1)
        >>> trainer = pl.Trainer(max_steps=3, accelerator="cpu", callbacks=schedule, barebones=True)
        >>> trainer.fit(Model())
        >>> trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        [0.0]
    """

    @names_options("ScheduleChoice(..., options={'NAME': ...})", schedule_option_names)
    def __init__(
        self,
        schedule: str = "warmup-cosine",
        warmup: int | float | None = None,
        final: float | None = None,
        monitor: str = "val_loss",
        replace: bool = False,
        frequency: int = 1,
        total_steps: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_schedule(schedule, total_steps, warmup=warmup, final=final, frequency=frequency, options=options)
        self.schedule = schedule
        self.warmup = warmup
        self.final = final
        self.monitor = monitor
        self.replace = checked_flag("replace", replace)
        self.frequency = frequency
        self.total_steps = total_steps
        self.options = None if options is None else dict(options)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        text = str(exception)
        if self.schedule == PLATEAU and f"conditioned on metric {self.monitor} " in text:
            exception.args = (f"{text} Here that is ScheduleChoice({PLATEAU!r}, monitor=...).",)

    def schedule_for(self, module: pl.LightningModule, optimizer: Optimizer) -> dict[str, Any]:
        """The ``"lr_scheduler"`` of ``configure_optimizers``, for a module in a fit."""
        settings = {
            "warmup": self.warmup,
            "final": self.final,
            "frequency": self.frequency,
            "total_steps": self.total_steps,
            "options": self.options,
        }
        return schedule_for(module, optimizer, self.schedule, self.monitor, settings)
