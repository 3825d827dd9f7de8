"""The engine of ``torchao``: quantized weights for a GPU, and a smaller file for a CPU.

On a CPU torchao turns int8 and int4 weights back into float at each call, so a network becomes smaller and slower
(measured: 0.4 to 1.2 times the speed; pytorch/ao #4365, #3157 report the same). On CUDA its kernels need
``torch.compile``, which is switched on there; that was written from its documentation and has not been run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.calls import Call, used_modules
from lightning_speedkit.compress.engine import Artefact, Converted
from lightning_speedkit.compress.exported import export_part
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.int8 import containers, weighted_layers
from lightning_speedkit.compress.module_names import matches
from lightning_speedkit.compress.torchao_state import TorchaoState
from lightning_speedkit.compress.torchao_weights import INT4_GROUP, quantize_layers, quiet_torchao
from lightning_speedkit.compress.weight_shapes import weight_shapes
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["TorchaoPrepared", "missing", "prepare"]

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
    refused.update(_shared_with_float(floating, refused))  # also where a container holds the weight
    no_layers = containers(floating)
    return TorchaoPrepared(floating, calls, device, scheme, refused, no_layers)


@dataclass(slots=True)
class TorchaoPrepared:
    """What :class:`Prepared` asks for, by torchao.

    ``refused`` says why a layer cannot be quantized; of ``no_layers`` nothing is said.
    """

    floating: nn.Module
    calls: Sequence[Call]
    device: str
    scheme: str
    refused: dict[str, str] = field(default_factory=dict)
    no_layers: set[str] = field(default_factory=set)

    @property
    def layers(self) -> tuple[str, ...]:
        """The Linear layers that run and whose width fits."""
        return tuple(name for name in weighted_layers(self.floating) if name not in self.refused)

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        """A copy whose Linear layers hold quantized weights."""
        chosen = [name for name in self.layers if not matches(name, skip)]
        refused = {name: reason for name, reason in self.refused.items() if name not in self.no_layers}
        if not chosen:
            why = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "all of them are skipped"
            raise QuantizationError(f"No layer can be quantized by torchao ({why}).")
        skipped = {**{name: "named in skip" for name in self.layers if name not in chosen}, **refused}
        twin = copy_module(self.floating).to(self.device)
        quantize_layers(twin, chosen, self.scheme, self.device)
        recipe = {"engine": _NAMES[self.scheme], "scheme": self.scheme, "device": self.device, "layers": chosen}
        artefacts: dict[str, Artefact] = {"state_dict": TorchaoState(twin, recipe)}
        if self.device == "cpu":
            artefacts["pt2"] = ExportedArtefact(twin, self.calls, weight_shapes(self.floating))
        else:
            for name in dict.fromkeys(call.name for call in self.calls):
                twin.get_submodule(name).compile()
        return Converted(twin, _NAMES[self.scheme], self.scheme, tuple(chosen), skipped, recipe, artefacts)


@dataclass(slots=True)
class ExportedArtefact:
    """Writes each part that is called from outside as a program of ``torch.export``.

    ``weights`` are the shapes of the float network's, by which a foreign one is refused when it is loaded.
    """

    module: nn.Module
    calls: Sequence[Call]
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)

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
        weights = {name: list(shape) for name, shape in self.weights.items()}
        return {"files": [part["file"] for part in parts], "parts": parts, "weights": weights}


def _refusal(name: str, layer: nn.Module, used: Mapping[str, Any], scheme: str) -> str | None:
    if isinstance(layer, nn.MultiheadAttention):
        return "its projections are raw parameters, which torchao does not quantize"
    if not isinstance(layer, nn.Linear):
        return f"torchao quantizes Linear layers, and this is a {type(layer).__name__}"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight itself"
    if name not in used:
        return "not called on the calibration batches"
    if scheme == "weight-only-int4" and layer.in_features % INT4_GROUP:
        return f"its {layer.in_features} inputs do not divide into groups of {INT4_GROUP}"
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
