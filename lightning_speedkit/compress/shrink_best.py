"""Tells when QuantizeOnFitEnd(weights="best") is going to quantize a network that StructuredPruning cut later."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.quantize_fit import with_best_weights
from lightning_speedkit.compress.shrink_report import count_parameters
from lightning_speedkit.compress.shrink_resize import original_sizes
from lightning_speedkit.compress.shrink_sizes import tensor_sizes
from lightning_speedkit.errors import QuantizationError

__all__ = ["warn_of_another_size"]


def warn_of_another_size(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Warns if the best checkpoint is to be quantized, and has other sizes than the shrunk module at the end."""
    callbacks: list[Any] = vars(trainer)["callbacks"]
    asked = any(isinstance(callback, QuantizeOnFitEnd) and callback.weights == "best" for callback in callbacks)
    if not asked or not original_sizes(module):
        return
    try:
        best = with_best_weights(trainer, module)
    except QuantizationError:  # which QuantizeOnFitEnd reports
        return
    if tensor_sizes(best) == tensor_sizes(module):
        return
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    rank_zero_warn(
        "QuantizeOnFitEnd(weights='best') quantizes the best checkpoint of this fit, which is not of the size that "
        f"StructuredPruning left: {path} has {count_parameters(best):,} parameters, the network at the end "
        f"{count_parameters(module):,}. Use weights='last', or a ModelCheckpoint that saves nothing before the last "
        "cut (every_n_epochs)."
    )
