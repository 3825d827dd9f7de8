"""The engine of ``torch.ao``: int8 by torch's own kernels, as long as torch has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.calls import Call, used_modules
from lightning_speedkit.compress.engine import Artefact, Converted
from lightning_speedkit.compress.int8 import make_int8, static_method, weighted_layers
from lightning_speedkit.compress.torch_ao import (
    CONVOLUTIONS,
    dynamic_refusal,
    has_torch_ao,
    quantized_engine,
    static_refusal,
)
from lightning_speedkit.errors import QuantizationError

__all__ = ["AoPrepared", "missing", "prepare"]


def missing(device: str, scheme: str) -> str | None:  # noqa: ARG001 - every engine is asked the same way
    """Why torch cannot quantize by itself here, or ``None``."""
    if not has_torch_ao():
        return (
            f"torch {torch.__version__} has no torch.ao.quantization any more: pip install 'lightning-speedkit[quant]'"
        )
    try:
        quantized_engine()
    except QuantizationError as error:
        return str(error)
    return None


def prepare(
    floating: nn.Module,
    calls: Sequence[Call],
    device: str,  # noqa: ARG001 - every engine is asked the same way
    scheme: str,
) -> AoPrepared:
    """``floating`` as it is: torch.ao traces and calibrates at each conversion."""
    return AoPrepared(floating, calls, scheme)


@dataclass(slots=True)
class AoPrepared:
    """What :class:`Prepared` asks for, by ``torch.ao``."""

    floating: nn.Module
    calls: Sequence[Call]
    scheme: str

    @property
    def method(self) -> str:
        """The method of :func:`make_int8` for the scheme."""
        return "dynamic" if self.scheme == "dynamic-int8" else static_method(self.floating)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of a kind that can be int8."""
        used, kernels = used_modules(self.floating, self.calls), quantized_engine()
        static = (*CONVOLUTIONS, nn.Linear) if self.scheme == "static-int8" else ()
        return tuple(
            name
            for name, layer in weighted_layers(self.floating).items()
            if name in used
            and (type(layer) in static or dynamic_refusal(layer) is None)
            and static_refusal(layer, kernels) is None
        )

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        """The int8 copy, calibrated on the calls."""
        made = make_int8(self.floating, self.calls, method=self.method, skip=skip)
        if not made.quantized:
            why = "; ".join(f"{name}: {reason}" for name, reason in made.skipped.items()) or "it has none with a weight"
            raise QuantizationError(f"No layer can be quantized by torch.ao ({why}).")
        name = "torch-ao-static" if self.scheme == "static-int8" else "torch-ao-dynamic"
        state: dict[str, Artefact] = {"state_dict": AoState(made.module, made.recipe)}
        return Converted(made.module, name, self.scheme, made.quantized, made.skipped, made.recipe, state)


@dataclass(slots=True)
class AoState:
    """Writes an int8 model of ``torch.ao`` as ``model.pt``."""

    module: nn.Module
    recipe: Mapping[str, Any]

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write it into ``folder``."""
        from lightning_speedkit.compress.artefact import MODEL_FILE, save_quantized

        save_quantized(self.module, self.recipe, folder / MODEL_FILE)
        return {"files": [MODEL_FILE]}
