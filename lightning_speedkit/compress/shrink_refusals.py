"""What StructuredPruning cannot work with, said before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_speedkit.compress.module_names import check_names
from lightning_speedkit.compress.quality import metric_direction
from lightning_speedkit.measure.lightning_internals import has_hook_state

__all__ = ["refuse_arguments", "refuse_judging", "refuse_module", "refuse_optimizers", "refuse_run"]

_KEEP_SHAPES = ("AverageWeights", "NonFiniteGuard", "Pruning", "QuantizationAwareTraining", "SpikeGuard")  # of this kit


def refuse_run(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises if a strategy or another callback would be left with parameters of another size."""
    strategy = trainer.strategy
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)):
        raise MisconfigurationException(
            f"StructuredPruning changes the shape of parameters, and {type(strategy).__name__} has spread them over "
            "devices. Use strategy='ddp' or one device, or shrink_model() before the fit."
        )
    if isinstance(strategy, DDPStrategy) and has_hook_state(strategy):
        raise MisconfigurationException(
            "StructuredPruning wraps the model again after it changed, and the state of the DDP communication hook "
            "(ddp_comm_state) is that of the old shapes. Use a hook without state, or shrink_model() before the fit."
        )
    callbacks: list[Any] = vars(trainer)["callbacks"]
    for callback in callbacks:
        averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
        if averages or type(callback).__name__ in _KEEP_SHAPES:
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps copies of tensors in their old shapes, so it cannot run beside "
                "StructuredPruning. Use it in a second fit, of the shrunk model."
            )
    refuse_module(module)


def refuse_module(module: nn.Module) -> None:
    """Raises if the weights of ``module`` are not there, not its own, or fixed in compiled code."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"What is shrunk is a torch.nn.Module, got {module!r:.100}.")
    for name, part in module.named_modules():
        where = repr(name) if name else type(module).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise MisconfigurationException(
                f"{where} is scripted, and cannot be cut. Shrink it before torch.jit.script."
            )
        if part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule):
            raise MisconfigurationException(
                f"{where} is compiled for the shapes that it has. Shrink first, and compile in a second fit."
            )
        if any(is_lazy(tensor) for tensor in (*part._parameters.values(), *part._buffers.values())):
            raise MisconfigurationException(f"{where} is lazy and has no sizes yet: run the model once first.")
        if parametrize.is_parametrized(part) or _weight_is_computed(part):
            raise MisconfigurationException(
                f"The weight of {where} is computed by a parametrization or a pruning mask. Make it permanent first "
                "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove)."
            )


def refuse_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises if an optimizer keeps its state for all parameters in one piece."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LBFGS keeps the sizes of all parameters in one piece, so it cannot follow channels that are removed. Use "
            "another optimizer, or shrink_model() before the optimizer is made."
        )


def _weight_is_computed(module: nn.Module) -> bool:
    return "weight" in vars(module) and "weight" not in module._parameters


def refuse_judging(trainer: pl.Trainer, monitor: str | None, start_epoch: int) -> tuple[str, str]:
    """The metric to judge steps by and its mode; an error if there is none, or none before the first step."""
    watching = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    known = [(c.monitor, c.mode) for c in watching if isinstance(c, (ModelCheckpoint, EarlyStopping)) and c.monitor]
    if monitor is None and not known:
        raise MisconfigurationException(
            "max_metric_drop needs a metric: set monitor='...' to one that validation logs, or let ModelCheckpoint or "
            "EarlyStopping monitor one."
        )
    if start_epoch == 0:
        raise MisconfigurationException(
            "max_metric_drop compares with the metric before a step, and before epoch 0 there is none: set "
            "start_epoch=1 or later."
        )
    name, mode = (monitor, dict(known).get(monitor)) if monitor is not None else known[0]
    return name, mode or metric_direction(name)


def refuse_arguments(ratio: Any, head_ratio: Any, counts: dict[str, Any], skip: Any, drop: Any) -> None:
    """Raises ValueError or TypeError for a value that no shrinking could have."""
    for name, value in (("ratio", ratio), ("head_ratio", head_ratio)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if not 0 <= value < 1:
            raise ValueError(f"{name} is the share that goes and must be at least 0 and below 1, got {value}.")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}.")
        least = 0 if name == "start_epoch" else 1
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    check_names("skip", skip)
    if drop is not None:
        if isinstance(drop, bool) or not isinstance(drop, (int, float)):
            raise TypeError(f"max_metric_drop must be a number or None, got {drop!r}.")
        if drop != drop:
            raise ValueError("max_metric_drop must be a number, got NaN.")
