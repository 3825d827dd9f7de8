"""Which validation metric decides whether a quantized model is kept, and what it was for one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.quality import metric_direction
from lightning_speedkit.compress.validation import validation_metrics
from lightning_speedkit.errors import QuantizationError, did_you_mean
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["Judge", "ValidationData", "measured_metrics"]

_QUALITY = {"acc", "accuracy", "f1", "auroc", "auc", "iou", "dice", "map", "r2", "score", "precision", "recall"}
_QUALITY_ENDS = ("accuracy", "auroc", "precision", "recall", "score")  # MulticlassAccuracy, as torchmetrics names it


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationData:
    """What validation runs on: loaders as a Trainer takes them, and whose data hooks apply to their batches.

    ``in_float32`` says that the fit was in another dtype, and turned the batches to it as they are turned to float32.
    """

    loaders: Any
    datamodule: LightningDataModule | None = None
    limit_batches: int | None = None
    in_float32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Which metric decides, in which direction, and how large a drop is allowed.

    ``monitored`` holds the metrics that other callbacks watch, with their mode; they count if ``monitor`` is not set.
    """

    monitor: str | None = None
    mode: str = "auto"
    max_metric_drop: float = 0.01
    monitored: Sequence[tuple[str, str]] = ()

    def choose(self, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """The metric to judge by and its mode, or ``None`` if none was logged.

        A quality such as an accuracy goes before a loss: a loss has no scale of its own to set a limit on.

        >>> Judge().choose({"val_loss": 0.4, "val_acc": 0.9})
        ('val_acc', 'max')
        """
        logged = [name for name, value in metrics.items() if math.isfinite(value)]
        if self.monitor is not None:
            if self.monitor not in logged:
                raise QuantizationError(
                    f"monitor={self.monitor!r} was not logged as a finite number in validation; "
                    f"logged: {logged}.{did_you_mean(self.monitor, logged)}"
                )
            return self.monitor, self._mode(self.monitor)
        watched = [name for name, _ in self.monitored if name in logged]
        qualities = [name for name in logged if _is_quality(name)]
        losses = sorted((name for name in logged if metric_direction(name) == "min"), key=lambda n: n != "val_loss")
        best = [name for name in watched if self._mode(name) == "max"]
        return next(((name, self._mode(name)) for name in (*best, *qualities, *watched, *losses, *logged)), None)

    def _mode(self, name: str) -> str:
        return self.mode if self.mode != "auto" else dict(self.monitored).get(name) or metric_direction(name)


def measured_metrics(
    module: nn.Module, validation: ValidationData | None, device: str = "cpu"
) -> tuple[dict[str, float], int]:
    """What a copy of the LightningModule ``module`` logs in validation, and on how many batches per loader at most.

    Raises:
        QuantizationError: Its validation failed.
    """
    if validation is None:
        return {}, 0
    try:
        with own_random_numbers(device):  # the float model and the quantized copy draw the same random numbers
            return validation_metrics(
                copy_module(cast("LightningModule", module)),
                validation.loaders,
                datamodule=validation.datamodule,
                limit_batches=validation.limit_batches,
                device=device,
                in_float32=validation.in_float32,
            )
    except Exception as error:  # the code of the user, run alone
        raise QuantizationError(f"Validation failed ({type(error).__name__}: {error}).") from error


def _is_quality(name: str) -> bool:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    told = any(w in _QUALITY or w.rstrip("0123456789") in _QUALITY or w.endswith(_QUALITY_ENDS) for w in words)
    return told and metric_direction(name) == "max"  # a dice_loss is none
