"""Chooses which layers of a float model become int8, and makes them so.

A network is quantized in its largest parts that torch.fx can trace: those run in int8 from end to end, with
BatchNorm and ReLU fused, their ranges fixed by calibration. Linear and recurrent layers outside such parts measure
the range of their input at every call. What was done is written down as a recipe, which repeats it on a fresh model.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, inside_metrics, replay, used_modules
from lightning_speedkit.compress.float_copy import copy_module, replace_module
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.compress.torch_ao import (
    CONVOLUTIONS,
    convert_static,
    dynamic_layer,
    dynamic_refusal,
    is_quantized,
    quantized_engine,
    unobserved,
)
from lightning_speedkit.compress.traced import observe_forward, run_by_graph, signature_template
from lightning_speedkit.errors import QuantizationError

__all__ = ["Int8Model", "follow_recipe", "make_int8", "weighted_layers"]

_TRACE_TOLERANCE = 1e-3  # relative; folding BatchNorm into a convolution rounds differently, a wrong branch does not


@dataclass(slots=True)
class Int8Model:
    """An int8 copy, how it was made, and what stayed in float (name -> why)."""

    module: nn.Module
    recipe: dict[str, Any]
    quantized: tuple[str, ...]
    skipped: dict[str, str]


@dataclass(slots=True)
class _Part:
    """A traceable part: its name, its arguments, its graph, and whether it is a bare layer that needs a holder."""

    name: str
    template: dict[str, Any]
    graph: torch.fx.GraphModule
    is_layer: bool
    fused: list[str] = field(default_factory=list)

    def recipe(self) -> dict[str, Any]:
        return {"name": self.name, "template": self.template, "is_layer": self.is_layer, "fused": self.fused}


def weighted_layers(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a weight of two or more dimensions themselves: what quantization could make smaller."""
    metrics = inside_metrics(root)
    return {
        name: module
        for name, module in root.named_modules()
        if name not in metrics and any(weight.ndim >= 2 for weight in module.parameters(recurse=False))
    }


def make_int8(floating: nn.Module, calls: Sequence[Call], *, method: str, skip: Sequence[str] = ()) -> Int8Model:
    """An int8 copy of ``floating`` (from :func:`float_copy`), calibrated on ``calls``.

    ``method`` is ``"fx_static"``, ``"dynamic"`` or ``"fx_static+dynamic"``: parts with a convolution static, the
    Linear and recurrent layers that remain dynamic.
    """
    engine = quantized_engine()
    used = used_modules(floating, calls)
    reasons: dict[str, str] = {}
    kept_float = [n for n, layer in weighted_layers(floating).items() if _matches(n, skip) or _static_refusal(layer)]
    result = copy_module(floating)
    parts: list[_Part] = []
    if "fx_static" in method:
        wanted = CONVOLUTIONS if "dynamic" in method else (*CONVOLUTIONS, nn.Linear)
        search = _Search(wanted, used, {call.name for call in calls}, engine, kept_float, reasons)
        parts = _calibrated(floating, search.parts(floating), calls, reasons)
        for part in parts:
            result = _install(result, part)
    dynamic: list[str] = []
    if "dynamic" in method:
        for name, layer in list(result.named_modules()):
            if name in used and name not in kept_float and dynamic_refusal(layer) is None:
                result = replace_module(result, name, dynamic_layer(copy.deepcopy(layer)))
                dynamic.append(name)
    recipe = {
        "engine": engine,
        "static": [part.recipe() for part in parts],
        "dynamic": dynamic,
        "float": kept_float,
        "shapes": _shapes(floating),
    }
    return _described(floating, result, recipe, used, reasons)


def follow_recipe(floating: nn.Module, recipe: Mapping[str, Any]) -> nn.Module:
    """``floating`` with the structure of the int8 model that ``recipe`` describes; its weights are still to come."""
    if (shapes := _shapes(floating)) != recipe["shapes"]:
        names = sorted(name for name in {*shapes, *recipe["shapes"]} if shapes.get(name) != recipe["shapes"].get(name))
        first = names[0] if names else "order"
        raise QuantizationError(
            f"its parameter {first!r} has shape {shapes.get(first)}, in the file {recipe['shapes'].get(first)}"
        )
    pristine = copy_module(floating)
    for entry in recipe["static"]:
        part, name = copy_module(pristine.get_submodule(entry["name"])), entry["name"]
        if entry["is_layer"]:
            part = nn.Sequential(part)
        graph = observe_forward(part, entry["template"], engine=recipe["engine"], skip=_inside(name, recipe["float"]))
        floating = _install(
            floating, _Part(name, entry["template"], convert_static(graph), entry["is_layer"], list(entry["fused"]))
        )
    for name in recipe["dynamic"]:
        floating = replace_module(floating, name, dynamic_layer(copy.deepcopy(floating.get_submodule(name))))
    return floating


@dataclass(slots=True)
class _Search:
    """Finds the outermost parts that torch.fx can trace and that hold a layer worth it."""

    wanted: tuple[type[nn.Module], ...]
    used: Mapping[str, Call]
    entries: set[str]
    engine: str
    kept_float: Sequence[str]
    reasons: dict[str, str]

    def parts(self, module: nn.Module, name: str = "") -> list[_Part]:
        if not self._worth(module, name):
            return []
        if name in self.used and not any(self._is_inside(entry, name) for entry in self.entries):
            try:
                return [self._observed(module, name)]
            except Exception as error:  # torch.fx and user code raise anything; the layers inside are tried instead
                self.reasons[name] = f"torch.fx cannot trace it ({type(error).__name__}: {str(error).splitlines()[0]})"
        found: list[_Part] = []
        for key, child in module.named_children():
            found += self.parts(child, f"{name}.{key}" if name else key)
        return found

    def _worth(self, module: nn.Module, name: str) -> bool:
        return any(
            type(m) in self.wanted and path in self.used and path not in self.kept_float
            for path, m in ((f"{name}.{key}".strip("."), m) for key, m in module.named_modules())
        )

    @staticmethod
    def _is_inside(entry: str, name: str) -> bool:
        return entry != name and (name == "" or entry.startswith(f"{name}."))

    def _observed(self, module: nn.Module, name: str) -> _Part:
        call = self.used[name]
        is_layer = type(module) in self.wanted
        part = nn.Sequential(copy_module(module)) if is_layer else copy_module(module)
        template = signature_template(part, call.args, call.kwargs)
        graph = observe_forward(copy_module(part), template, engine=self.engine, skip=_inside(name, self.kept_float))
        if not any(type(m) in self.wanted or _is_fused(m) for m in graph.modules()):
            raise QuantizationError("its layers are out of reach inside a module of torch")
        run_by_graph(part, copy.deepcopy(graph), template)
        if (error := relative_error(replay_one(module, call), replay_one(part, call))) > _TRACE_TOLERANCE:
            raise QuantizationError(f"its traced forward differs from the real one by {error:.1e}")
        return _Part(name, template, graph, is_layer)


def replay_one(module: nn.Module, call: Call) -> list[Tensor]:
    """What ``module`` itself answers the arguments of ``call`` with."""
    return replay(module, [Call("", call.args, call.kwargs)])


def _calibrated(floating: nn.Module, parts: list[_Part], calls: Sequence[Call], reasons: dict[str, str]) -> list[_Part]:
    """The parts whose observers have seen all of ``calls`` and that converted, now with their int8 graphs."""
    if not parts:
        return []
    observed = copy_module(floating)
    for part in parts:
        observed = _install(observed, part)
    replay(observed, calls)
    done: list[_Part] = []
    for part in parts:
        silent = unobserved(part.graph)
        if silent:
            reasons[part.name] = f"{len(silent)} of its observers saw no value"
            continue
        try:
            part.graph = convert_static(part.graph)
        except Exception as error:  # a layer without an int8 kernel here; it stays in float
            reasons[part.name] = f"torch cannot convert it ({type(error).__name__}: {str(error).splitlines()[0]})"
            continue
        called = {str(node.target) for node in part.graph.graph.nodes if node.op == "call_module"}
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        inner = floating.get_submodule(part.name).named_modules()
        part.fused = [key for key, m in inner if key and type(m) in norms and key not in called]
        done.append(part)
    return done


def _install(root: nn.Module, part: _Part) -> nn.Module:
    target = root.get_submodule(part.name)
    if part.is_layer:
        target = nn.Sequential(target)
        target.eval()
    run_by_graph(target, part.graph, part.template, fused=part.fused)
    return replace_module(root, part.name, target) if part.is_layer else root


def _described(
    floating: nn.Module, result: nn.Module, recipe: dict[str, Any], used: Mapping[str, Call], reasons: dict[str, str]
) -> Int8Model:
    layers = weighted_layers(floating)
    holders = {entry["name"] for entry in recipe["static"] if entry["is_layer"]}
    now = dict(result.named_modules())
    quantized = [n for n in layers if is_quantized(now[f"{n}.0".lstrip(".") if n in holders else n])]
    skipped = {
        name: _why(name, layer, recipe, used, reasons) for name, layer in layers.items() if name not in quantized
    }
    return Int8Model(result, recipe, tuple(quantized), skipped)


def _why(
    name: str, layer: nn.Module, recipe: Mapping[str, Any], used: Mapping[str, Call], reasons: Mapping[str, str]
) -> str:
    if (refusal := _static_refusal(layer)) is not None:
        return refusal
    if name in recipe["float"]:
        return "named in skip"
    if isinstance(layer, nn.MultiheadAttention):
        return "its projections are raw parameters, which torch does not quantize"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its float weight"
    if name not in used:
        return "not called on the calibration batches"
    owners = [owner for owner in reasons if owner in ("", name) or name.startswith(f"{owner}.")]
    if type(layer) in (*CONVOLUTIONS, nn.Linear) and owners:
        return reasons[max(owners, key=len)]
    return dynamic_refusal(layer) or "outside the int8 parts"


def _static_refusal(layer: nn.Module) -> str | None:
    mode = getattr(layer, "padding_mode", "zeros")
    if type(layer) in CONVOLUTIONS and mode not in ("zeros", "reflect"):
        return f"padding_mode={mode!r} has no int8 version"
    return None


def _is_fused(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.intrinsic") and isinstance(module, nn.Sequential)


def _shapes(floating: nn.Module) -> dict[str, tuple[int, ...]]:
    # int8 layers load weights of any shape without a word
    return {name: tuple(weight.shape) for name, weight in floating.named_parameters()}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or name.startswith(f"{p}.") for p in patterns)


def _inside(part: str, names: Sequence[str]) -> list[str]:
    if not part:
        return list(names)
    return [name[len(part) + 1 :] for name in names if name.startswith(f"{part}.")]
