"""The engine of ONNX Runtime on a CPU: static or dynamic int8, and the same graph in float32 to measure beside.

Weights have one scale per output channel. Without VNNI they are kept to 7 bits, because 8-bit products overflow there
without a word. Measured on AVX2: an MLP static 2.3 to 2.7 times as fast as eager float32, with int8 convolutions only
where they are static.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.artefact_folder import REST_FILE, input_shapes, part_files
from lightning_speedkit.compress.calls import Call, used_modules
from lightning_speedkit.compress.cpu_int8 import has_exact_int8
from lightning_speedkit.compress.engine import FLOAT32, Artefact, Converted
from lightning_speedkit.compress.float_copy import copy_module, fingerprint
from lightning_speedkit.compress.int8 import containers, weighted_layers
from lightning_speedkit.compress.module_names import matches
from lightning_speedkit.compress.onnx_graph import graph_bytes, layer_of_node
from lightning_speedkit.compress.onnx_module import OnnxModule, install, missing_onnx
from lightning_speedkit.compress.onnx_parts import OnnxPart, find_parts
from lightning_speedkit.compress.onnx_quantize import (
    DYNAMIC_OPS,
    STATIC_OPS,
    dynamic_int8,
    measured_ranges,
    quantized_numbers,
    static_int8,
)
from lightning_speedkit.compress.weight_shapes import weight_shapes
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["OnnxArtefact", "OnnxPrepared", "missing", "prepare"]

_NAMES = {
    "static-int8": "onnxruntime-static",
    "dynamic-int8": "onnxruntime-dynamic",
    FLOAT32: "onnxruntime-float32",
}
_ALLOWED = {"static-int8": STATIC_OPS, "dynamic-int8": DYNAMIC_OPS, FLOAT32: ()}
# static and dynamic int8 and float32 of one network begin with the same export, which takes seconds
_exports: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def missing(device: str, scheme: str) -> str | None:  # noqa: ARG001 - every engine is asked the same way
    """The line that installs what is missing, or ``None``."""
    return missing_onnx()


def prepare(
    floating: nn.Module,
    calls: Sequence[Call],
    device: str,  # noqa: ARG001 - every engine is asked the same way
    scheme: str,
) -> OnnxPrepared:
    """Export the largest parts that can be, and measure the ranges of their values for a static scheme."""
    if missing_onnx() is not None:
        raise MissingExtraError("ONNX Runtime", extra="quant", library="onnx, onnxscript and onnxruntime")
    parts, reasons = _exported(floating, calls)
    if not parts:
        raise QuantizationError(f"No part of it can become an ONNX graph: {_listed(reasons)}.")
    ranges = {part.name: measured_ranges(part.graph, part.inputs) for part in parts if scheme == "static-int8"}
    used = set(used_modules(floating, calls))
    return OnnxPrepared(floating, parts, reasons, ranges, used, scheme)


@dataclass(slots=True)
class OnnxPrepared:
    """What :class:`Prepared` asks for, by ONNX Runtime."""

    floating: nn.Module
    parts: list[OnnxPart]
    reasons: dict[str, str]
    ranges: dict[str, Any]
    used: set[str]
    scheme: str

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have a node which the scheme can quantize."""
        able = {
            name
            for part in self.parts
            for node in part.graph.model.graph.node
            if (number := layer_of_node(node.name)) is not None and node.op_type in _ALLOWED[self.scheme]
            for name in part.graph.layers[number]
        }
        return tuple(name for name in weighted_layers(self.floating) if name in able)

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        """A copy whose parts run in ONNX Runtime."""
        result, exact = copy_module(self.floating), has_exact_int8()
        runners: dict[str, OnnxModule] = {}
        quantized: set[str] = set()
        for part in self.parts:
            graph = self._graph(part, skip, reduce_range=not exact)
            runners[part.name] = OnnxModule(graph, part.form)
            result = install(result, part.name, runners[part.name])
            quantized.update(_quantized_layers(part, graph))
        if self.scheme != FLOAT32 and not quantized:
            raise QuantizationError(f"No layer could be quantized: {_listed(self._skipped(set(), skip))}.")
        layers = weighted_layers(self.floating)
        recipe = {"engine": _NAMES[self.scheme], "scheme": self.scheme, "full_range": exact and self.scheme != FLOAT32}
        artefact = OnnxArtefact(
            runners,
            {part.name: part for part in self.parts},
            recipe,
            result,
            bool(self.reasons),
            weight_shapes(self.floating),
        )
        artefacts: dict[str, Artefact] = {"onnx": artefact}
        return Converted(
            result.eval(),
            _NAMES[self.scheme],
            self.scheme,
            tuple(name for name in layers if name in quantized),
            self._skipped(quantized, skip),
            recipe,
            artefacts,
        )

    def _graph(self, part: OnnxPart, skip: Sequence[str], *, reduce_range: bool) -> bytes:
        kept = {n for n, names in enumerate(part.graph.layers) if any(matches(name, skip) for name in names)}
        if self.scheme == "static-int8":
            return static_int8(part.graph, self.ranges[part.name], kept, reduce_range=reduce_range)
        if self.scheme == "dynamic-int8":
            return dynamic_int8(part.graph, kept, reduce_range=reduce_range)
        return graph_bytes(part.graph.model)

    def _skipped(self, quantized: set[str], skip: Sequence[str]) -> dict[str, str]:
        able, no_layers = set(self.layers), containers(self.floating)
        return {
            name: self._why(name, layer, able, skip)
            for name, layer in weighted_layers(self.floating).items()
            if name not in quantized and name not in no_layers
        }

    def _why(self, name: str, layer: nn.Module, able: set[str], skip: Sequence[str]) -> str:
        kind = type(layer).__name__
        if self.scheme == FLOAT32:
            return "float32 is measured beside"
        if matches(name, skip):
            return "named in skip"
        if not any(part.name in ("", name) or name.startswith(f"{part.name}.") for part in self.parts):
            owners = [owner for owner in self.reasons if owner in ("", name) or name.startswith(f"{owner}.")]
            return self.reasons[max(owners, key=len)] if owners else "not called on the calibration batches"
        if name in able:
            return "ONNX Runtime left it in float"
        if name not in self.used and not isinstance(layer, nn.Linear):
            return "not called on the calibration batches"
        return f"ONNX Runtime has no {self.scheme.replace('-', ' ')} version of the operators of {kind} that is fast"


@dataclass(slots=True)
class OnnxArtefact:
    """Writes each part as an ONNX graph, and the state of what is outside of them.

    ``is_partial`` says that code of the network runs between the parts, so that loading needs the network. ``weights``
    are the shapes of the float network's, by which a foreign one is refused when it is loaded.
    """

    runners: Mapping[str, OnnxModule]
    parts: Mapping[str, OnnxPart]
    recipe: Mapping[str, Any]
    whole: nn.Module
    is_partial: bool
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write ``model.onnx`` (and so on) into ``folder``."""
        told = []
        for name, file in part_files(list(self.runners), "onnx").items():
            (folder / file).write_bytes(self.runners[name].graph)
            example = input_shapes(self.parts[name].inputs[0])
            told.append({"name": name, "file": file, "inputs": example, "form": self.parts[name].form.to_plain()})
        files = [str(part["file"]) for part in told]
        rest = {} if "" in self.runners else self.whole.state_dict()
        if rest:
            torch.save(rest, folder / REST_FILE)
            files.append(REST_FILE)
        return {
            "files": files,
            "parts": told,
            "rest": REST_FILE if rest else None,
            "is_partial": self.is_partial,
            "weights": {name: list(shape) for name, shape in self.weights.items()},
            "full_range": self.recipe["full_range"],
        }


def _exported(floating: nn.Module, calls: Sequence[Call]) -> tuple[list[OnnxPart], dict[str, str]]:
    now = (fingerprint(floating), tuple(id(call) for call in calls))
    known = _exports.get(floating)
    if known is None or known[0] != now:
        known = (now, find_parts(floating, calls), list(calls))  # the calls are kept, so that their ids stay theirs
        _exports[floating] = known
    parts, reasons = known[1]
    return list(parts), dict(reasons)


def _quantized_layers(part: OnnxPart, graph: bytes) -> set[str]:
    import onnx

    numbers = quantized_numbers(onnx.load_from_string(graph))
    return {name for number in numbers for name in part.graph.layers[number]}


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name or 'the network'}: {reason}" for name, reason in reasons.items()) or "it has no weights"
