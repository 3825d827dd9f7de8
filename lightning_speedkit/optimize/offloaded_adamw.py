"""AdamW whose states are in the memory of the host and whose step is computed there, by torchao.

When it helps: the optimizer's state does not fit beside the model on one GPU. What it costs: gradients travel to the
host and weights back in every step, and the step runs on the CPU.

Each gradient is copied to the host while the backward pass goes on. What is done to gradients after it (unscaling,
clipping, dropping, weighing) would reach the copy too late, so such combinations are refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.spike_guard import SpikeGuard

__all__ = ["OFFLOADED", "check_devices", "class_of_torchao", "refuse_late_changes"]

OFFLOADED = "adamw-cpu-offload"
_CHANGE_GRADIENTS = (AccumulationScheduler, AutoMicroBatch, GradientClipping, NonFiniteGuard, SpikeGuard)
_CLASSES = {"adamw-8bit": "AdamW8bit", OFFLOADED: "CPUOffloadOptimizer"}


def class_of_torchao(name: str) -> type[Optimizer]:
    """The class of torchao that is behind this name.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    try:
        found: type[Optimizer] = getattr(importlib.import_module("torchao.optim"), _CLASSES[name])
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(f"The optimizer {name!r}", extra="ao", library="torchao") from error
    return found


def check_devices(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if there is a parameter whose states are in the host's memory anyway.

    >>> check_devices([nn.Parameter()])
    Traceback (most recent call last):
        ...
    ValueError: 'adamw-cpu-offload' is for weights on a CUDA or XPU device, and some are on 'cpu'. Use 'adamw' there.
    """
    others = sorted({p.device.type for p in parameters} - {"cuda", "xpu"})
    if others:
        raise ValueError(
            f"{OFFLOADED!r} is for weights on a CUDA or XPU device, and some are on {', '.join(map(repr, others))}. "
            "Use 'adamw' there."
        )


def refuse_late_changes(trainer: pl.Trainer) -> None:
    """Raise if something in this Trainer changes gradients after the backward pass.

    Raises:
        MisconfigurationException: It does; the message names it.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = [type(callback).__name__ for callback in callbacks if isinstance(callback, _CHANGE_GRADIENTS)]
    if trainer.gradient_clip_val:
        found.append(f"Trainer(gradient_clip_val={trainer.gradient_clip_val})")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        found.append(f"the gradient scaler of precision {trainer.precision!r}")
    if trainer.world_size > 1:
        found.append(f"{trainer.world_size} processes, whose gradients are averaged")
    if found:
        raise MisconfigurationException(
            f"The optimizer {OFFLOADED!r} copies each gradient to the host during the backward pass, and does not see "
            f"what is done to it later, by {', '.join(found)}. Remove that, or use 'adamw-8bit' or 'adafactor', which "
            "save memory too."
        )
