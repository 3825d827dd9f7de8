"""The state of a network with torchao's weights as plain tensors, which a file can hold without their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.torchao_weights import quantize_layers
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["TorchaoState", "inner_tensors", "load_torchao", "pack_int4", "unpack_int4"]


def inner_tensors(weight: Tensor) -> dict[str, Tensor]:
    """The plain tensors inside a quantized weight, by name."""
    flatten: Any = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        return {}
    return {name: getattr(weight, name) for name in flatten()[0]}


def pack_int4(values: Tensor) -> Tensor:
    """int8 values from -8 to 7, two in a byte; the last dimension is even.

    >>> unpack_int4(pack_int4(torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)))
    tensor([[-8,  7,  0, -1]], dtype=torch.int8)
    """
    low, high = (values[..., 0::2] + 8).to(torch.uint8), (values[..., 1::2] + 8).to(torch.uint8)
    return low | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """What :func:`pack_int4` packed."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    return (pairs.flatten(-2).to(torch.int8) - 8).contiguous()


@dataclass(slots=True)
class TorchaoState:
    """Writes the state as plain tensors, int4 values two in a byte; a tensor subclass would need its code to load."""

    module: nn.Module
    recipe: Mapping[str, Any]

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write ``model.pt`` into ``folder``."""
        from lightning_speedkit.compress.artefact import MODEL_FILE

        state, inner = {}, {}
        for name, value in self.module.state_dict().items():
            parts = inner_tensors(value)
            if not parts:
                state[name] = value.detach().cpu().clone()
                continue
            packs = self.recipe["scheme"] == "weight-only-int4" and self.recipe["device"] == "cpu"
            inner[name] = {
                key: pack_int4(part) if packs and part.dtype == torch.int8 and key == "qdata" else part.detach().clone()
                for key, part in parts.items()
            }
        content = {
            "format": 2,
            "torch": str(torch.__version__),
            "recipe": dict(self.recipe),
            "state": state,
            "inner": inner,
        }
        torch.save(content, folder / MODEL_FILE)
        return {"files": [MODEL_FILE]}


def load_torchao(floating: nn.Module, content: Mapping[str, Any]) -> nn.Module:
    """``floating``, with the quantized weights and the rest of the state that :class:`TorchaoState` wrote."""
    if find_spec("torchao") is None:
        raise MissingExtraError("weight-only quantization", extra="quant", library="torchao")
    recipe = content["recipe"]
    quantize_layers(floating, recipe["layers"], recipe["scheme"], recipe["device"])
    state = floating.state_dict()
    if (missing_keys := state.keys() ^ (content["state"].keys() | content["inner"].keys())) != set():
        raise QuantizationError(f"its state has other names: {sorted(missing_keys)[:3]}")
    for name, value in content["state"].items():
        if value.shape != state[name].shape:
            raise QuantizationError(f"{name} has shape {tuple(state[name].shape)}, in the file {tuple(value.shape)}")
        state[name].copy_(value)
    for name, saved in content["inner"].items():
        if (parts := inner_tensors(state[name])).keys() != saved.keys():
            raise QuantizationError(f"{name} has the tensors {sorted(parts)}, in the file {sorted(saved)}")
        for key, part in parts.items():
            value = saved[key]
            if value.dtype == torch.uint8 and part.dtype == torch.int8:
                value = unpack_int4(value)
            if value.shape != part.shape or value.dtype != part.dtype:
                raise QuantizationError(
                    f"{name} has shape {tuple(part.shape)} of {part.dtype}, in the file {tuple(value.shape)} of "
                    f"{value.dtype}"
                )
            part.copy_(value)
    return floating.requires_grad_(False)
