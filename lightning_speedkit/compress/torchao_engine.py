"""The engine of ``torchao``: quantized weights for a GPU, and a smaller file for a CPU.

On a CPU torchao turns int8 and int4 weights back into float at each call, so a network becomes smaller and slower
(measured: 0.5 to 0.9 of the speed; pytorch/ao #4365, #3157 report the same). On CUDA its kernels need ``torch.compile``,
which is switched on there; that was written from its documentation and has not been run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, used_modules
from lightning_speedkit.compress.engine import Artefact, Converted
from lightning_speedkit.compress.exported import export_part
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.int8 import matches, weighted_layers
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = [
    "TorchaoPrepared",
    "inner_tensors",
    "load_torchao",
    "missing",
    "pack_int4",
    "prepare",
    "quantize_layers",
    "unpack_int4",
]

_GROUP = 32
_NAMES = {
    "weight-only-int8": "torchao-weight-int8",
    "weight-only-int4": "torchao-weight-int4",
    "dynamic-int8": "torchao-dynamic-int8",
    "fp8": "torchao-fp8",
}


def missing(device: str, scheme: str) -> str | None:
    """Why torchao cannot work for ``device`` here, with what cures it; ``None`` if it can."""
    if find_spec("torchao") is None:
        return str(MissingExtraError("weight-only quantization", extra="quant", library="torchao"))
    if device != "cuda":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device here; use device='cpu'"
    if scheme == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"float8 needs a CUDA device of capability 8.9 or higher, and this one has {found}; use an int8 scheme"
    if scheme == "weight-only-int4" and find_spec("mslk") is None:
        return "torchao's int4 kernels for CUDA need mslk: pip install mslk"
    return None


def prepare(floating: nn.Module, calls: Sequence[Call], device: str, scheme: str) -> TorchaoPrepared:
    """Find the layers that torchao can quantize; weights need no calibration."""
    if (reason := missing(device, scheme)) is not None:
        if find_spec("torchao") is None:
            raise MissingExtraError("weight-only quantization", extra="quant", library="torchao")
        raise QuantizationError(reason)
    used = used_modules(floating, calls)
    refused = {
        name: why for name, layer in weighted_layers(floating).items() if (why := _refusal(name, layer, used, scheme))
    }
    refused.update(_shared_with_float(floating, refused))
    return TorchaoPrepared(floating, calls, device, scheme, refused)


@dataclass(slots=True)
class TorchaoPrepared:
    """What :class:`Prepared` asks for, by torchao. ``refused`` says why a layer cannot be quantized."""

    floating: nn.Module
    calls: Sequence[Call]
    device: str
    scheme: str
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """The Linear layers that run and whose width fits."""
        return tuple(name for name in weighted_layers(self.floating) if name not in self.refused)

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        """A copy whose Linear layers hold quantized weights."""
        chosen = [name for name in self.layers if not matches(name, skip)]
        if not chosen:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items()) or "all of them are skipped"
            raise QuantizationError(f"No layer can be quantized by torchao ({why}).")
        skipped = {**{name: "named in skip" for name in self.layers if name not in chosen}, **self.refused}
        twin = copy_module(self.floating).to(self.device)
        quantize_layers(twin, chosen, self.scheme, self.device)
        recipe = {"engine": _NAMES[self.scheme], "scheme": self.scheme, "device": self.device, "layers": chosen}
        artefacts: dict[str, Artefact] = {"state_dict": TorchaoState(twin, recipe)}
        if self.device == "cpu":
            artefacts["pt2"] = ExportedArtefact(twin, self.calls)
        else:
            for name in dict.fromkeys(call.name for call in self.calls):
                twin.get_submodule(name).compile()
        return Converted(twin, _NAMES[self.scheme], self.scheme, tuple(chosen), skipped, recipe, artefacts)


def quantize_layers(root: nn.Module, names: Sequence[str], scheme: str, device: str) -> None:
    """Quantize the weights of the layers ``names`` of ``root`` in place."""
    wanted = {id(root.get_submodule(name)) for name in names}
    with quiet_torchao():
        import torchao.quantization as tq

        config: Any
        if scheme == "weight-only-int8":
            config = tq.Int8WeightOnlyConfig()
        elif scheme == "weight-only-int4" and device == "cpu":
            granularity: Any = tq.PerGroup(_GROUP)
            config = tq.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity)
        elif scheme == "weight-only-int4":
            config = tq.Int4WeightOnlyConfig()
        elif scheme == "fp8":
            config = tq.Float8DynamicActivationFloat8WeightConfig()
        else:
            config = tq.Int8DynamicActivationInt8WeightConfig()
        tq.quantize_(root, config, filter_fn=lambda module, _: id(module) in wanted)


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """torchao tells of missing GPU extensions and of deprecations at its import; not here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
        for key, part in inner_tensors(state[name]).items():
            value = saved[key]
            if value.dtype == torch.uint8 and part.dtype == torch.int8:
                value = unpack_int4(value)
            if value.shape != part.shape or value.dtype != part.dtype:
                raise QuantizationError(f"{name} has shape {tuple(part.shape)}, in the file {tuple(value.shape)}")
            part.copy_(value)
    return floating.requires_grad_(False)


@dataclass(slots=True)
class ExportedArtefact:
    """Writes each part that is called from outside as a program of ``torch.export``."""

    module: nn.Module
    calls: Sequence[Call]

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write ``model.pt2`` (and so on) into ``folder``."""
        from lightning_speedkit.compress.artefact_folder import part_files

        names = list(dict.fromkeys(call.name for call in self.calls))
        parts = []
        for name, file in part_files(names, "pt2").items():
            own = [call for call in self.calls if call.name == name]
            exported = export_part(self.module.get_submodule(name), name, own)
            with quiet_torchao():
                torch.export.save(exported.program, folder / file)
            parts.append({"name": name, "file": file, "form": exported.form.to_plain()})
        return {"files": [part["file"] for part in parts], "parts": parts}


def _refusal(name: str, layer: nn.Module, used: Mapping[str, Any], scheme: str) -> str | None:
    if isinstance(layer, nn.MultiheadAttention):
        return "its projections are raw parameters, which torchao does not quantize"
    if not isinstance(layer, nn.Linear):
        return f"torchao quantizes Linear layers, and this is a {type(layer).__name__}"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight itself"
    if name not in used:
        return "not called on the calibration batches"
    if scheme == "weight-only-int4" and layer.in_features % _GROUP:
        return f"its {layer.in_features} inputs do not divide into groups of {_GROUP}"
    return None


def _shared_with_float(root: nn.Module, refused: Mapping[str, str]) -> dict[str, str]:
    owners: dict[int, list[str]] = {}
    for name, layer in weighted_layers(root).items():
        for weight in layer.parameters(recurse=False):
            owners.setdefault(id(weight), []).append(name)
    found = {}
    for names in owners.values():
        kept = [name for name in names if name in refused]
        found.update(
            {
                name: f"its weight is shared with {kept[0]}, which stays in float"
                for name in names
                if kept and name not in refused
            }
        )
    return found
