"""Finds the parts of a network that torch.fx can trace, calibrates them, and puts their int8 graphs into a copy."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.float_copy import copy_module, replace_module
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.compress.torch_ao import convert_static, unobserved
from lightning_speedkit.compress.traced import observe_forward, run_by_graph, signature_template
from lightning_speedkit.errors import QuantizationError

__all__ = ["PartSearch", "TracedPart", "calibrated_parts", "install_part", "part_from_recipe"]

_TRACE_TOLERANCE = 1e-3  # relative; folding BatchNorm into a convolution rounds differently, a wrong branch does not
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(slots=True)
class TracedPart:
    """A traced part of a network.

    ``name`` is where it is, ``template`` are its arguments (see :func:`signature_template`), and ``graph`` is its
    forward, with observers or in int8. A part that ``is_layer``, a bare convolution or Linear, needs a holder around
    it. ``fused`` names the BatchNorm layers inside it that live on in a convolution.
    """

    name: str
    template: dict[str, Any]
    graph: torch.fx.GraphModule
    is_layer: bool
    fused: list[str] = field(default_factory=list)

    def recipe(self) -> dict[str, Any]:
        """What :func:`part_from_recipe` makes the structure of this part again from: plain Python."""
        return {"name": self.name, "template": self.template, "is_layer": self.is_layer, "fused": self.fused}


@dataclass(slots=True)
class PartSearch:
    """Finds the outermost parts that torch.fx can trace and that hold a layer worth it.

    ``wanted`` are the types worth it, ``used`` the modules that run with the arguments of their first call, and
    ``entries`` the names that are called from outside: what contains one of them cannot be replaced as a whole. Layers
    in ``kept_float`` stay in float. Why a part was not taken is put into ``reasons``.
    """

    wanted: tuple[type[nn.Module], ...]
    used: Mapping[str, Call]
    entries: Collection[str]
    engine: str
    kept_float: Sequence[str]
    reasons: dict[str, str]

    def parts(self, module: nn.Module, name: str = "") -> list[TracedPart]:
        """The parts of ``module``, which is known as ``name``, each with observers in its graph."""
        if not self._worth(module, name):
            return []
        if name in self.used and not any(_holds(name, entry) for entry in self.entries):
            try:
                return [self._observed(module, name)]
            except Exception as error:  # torch.fx and user code raise anything; the layers inside are tried instead
                self.reasons[name] = f"it cannot be traced and converted ({_in_a_line(error)})"
        found: list[TracedPart] = []
        for key, child in module.named_children():
            found += self.parts(child, f"{name}.{key}" if name else key)
        return found

    def _worth(self, module: nn.Module, name: str) -> bool:
        return any(
            type(m) in self.wanted and path in self.used and path not in self.kept_float
            for path, m in ((f"{name}.{key}".strip("."), m) for key, m in module.named_modules())
        )

    def _observed(self, module: nn.Module, name: str) -> TracedPart:
        call = Call("", self.used[name].args, self.used[name].kwargs)
        is_layer = type(module) in self.wanted
        part = nn.Sequential(copy_module(module)) if is_layer else copy_module(module)
        template = signature_template(part, call.args, call.kwargs)
        graph = observe_forward(copy_module(part), template, engine=self.engine, skip=_inside(name, self.kept_float))
        called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
        if not any(type(m) in self.wanted or _is_fused(m) for m in called):
            raise QuantizationError("its layers are out of reach inside a module of torch")
        # tried here, where a failure leaves the layers inside to be tried
        run_by_graph(copy_module(part), convert_static(copy.deepcopy(graph)), template)
        run_by_graph(part, copy.deepcopy(graph), template)
        if (error := relative_error(replay(module, [call]), replay(part, [call]))) > _TRACE_TOLERANCE:
            raise QuantizationError(f"its traced forward differs from the real one by {error:.1e}")
        return TracedPart(name, template, graph, is_layer)


def calibrated_parts(
    floating: nn.Module, parts: Sequence[TracedPart], calls: Sequence[Call], reasons: dict[str, str]
) -> list[TracedPart]:
    """The parts whose observers have seen all of ``calls`` and that converted, now with their int8 graphs.

    Why another one is left out is put into ``reasons``.
    """
    if parts and _observe(floating, parts, calls) is not None:
        failures = {part.name: _observe(floating, [part], calls) for part in parts}
        reasons.update({name: f"it cannot be calibrated ({why})" for name, why in failures.items() if why is not None})
        parts = [part for part in parts if failures[part.name] is None]
    done: list[TracedPart] = []
    for part in parts:
        if silent := unobserved(part.graph):
            reasons[part.name] = f"{len(silent)} of its observers saw no value"
            continue
        try:
            part.graph = convert_static(part.graph)
        except Exception as error:  # a layer without an int8 kernel here; it stays in float
            reasons[part.name] = f"torch cannot convert it ({_in_a_line(error)})"
            continue
        called = {str(node.target) for node in part.graph.graph.nodes if node.op == "call_module"}
        inner = floating.get_submodule(part.name).named_modules()
        part.fused = [key for key, m in inner if key and type(m) in _NORMS and key not in called]
        done.append(part)
    return done


def _observe(floating: nn.Module, parts: Sequence[TracedPart], calls: Sequence[Call]) -> str | None:
    """Let the observers of ``parts`` see ``calls``; why that failed, or ``None``."""
    observed = copy_module(floating)
    for part in parts:
        observed = install_part(observed, part)
    try:
        replay(observed, calls)
    except Exception as error:  # a forward that reads the weight of a layer whose place a holder has taken
        return _in_a_line(error)
    return None


def install_part(root: nn.Module, part: TracedPart) -> nn.Module:
    """``root``, in which the module that ``part`` was made from runs its graph."""
    target = root.get_submodule(part.name)
    if part.is_layer:
        target = nn.Sequential(target)
        target.eval()
    run_by_graph(target, part.graph, part.template, fused=part.fused)
    return replace_module(root, part.name, target) if part.is_layer else root


def part_from_recipe(
    floating: nn.Module, recipe: Mapping[str, Any], *, engine: str, kept_float: Sequence[str]
) -> TracedPart:
    """The int8 part that ``recipe`` describes, for a float model of the same structure; its weights mean nothing."""
    name, template = recipe["name"], recipe["template"]
    module = copy_module(floating.get_submodule(name))
    part = nn.Sequential(module) if recipe["is_layer"] else module
    graph = observe_forward(part, template, engine=engine, skip=_inside(name, kept_float))
    return TracedPart(name, template, convert_static(graph), recipe["is_layer"], list(recipe["fused"]))


def _holds(name: str, entry: str) -> bool:
    return entry != name and (name == "" or entry.startswith(f"{name}."))


def _inside(part: str, names: Sequence[str]) -> list[str]:
    if not part:
        return list(names)
    return [name[len(part) + 1 :] for name in names if name.startswith(f"{part}.")]


def _is_fused(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.intrinsic") and isinstance(module, nn.Sequential)


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
