"""Finds the largest parts of a network that can become ONNX graphs, and checks each against the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.call_form import CallForm, tensors_of
from lightning_speedkit.compress.calls import Call, call_with, first_sample, replay
from lightning_speedkit.compress.exported import export_part
from lightning_speedkit.compress.int8 import weighted_layers
from lightning_speedkit.compress.onnx_graph import OnnxGraph, graph_bytes, onnx_graph
from lightning_speedkit.compress.onnx_module import OnnxModule
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["OnnxPart", "find_parts"]

_TOLERANCE = 1e-3  # relative; what float32 kernels differ by, not what a wrong branch does
_ATTEMPTS = 24  # exports, at most: each takes seconds


@dataclass(slots=True)
class OnnxPart:
    """The part ``name`` of a network: how it is called, its graph in float32, and its inputs on the recorded calls."""

    name: str
    form: CallForm
    graph: OnnxGraph
    inputs: list[list[Tensor]]


def find_parts(floating: nn.Module, calls: Sequence[Call]) -> tuple[list[OnnxPart], dict[str, str]]:
    """The outermost parts of ``floating`` that could be exported, and why others could not, by name.

    What is called from outside is tried first, then what is inside of it.
    """
    search = _Search(floating, calls)
    for name in dict.fromkeys(call.name for call in calls):
        search.visit(name)
    return search.parts, search.reasons


class _Search:
    def __init__(self, floating: nn.Module, calls: Sequence[Call]) -> None:
        self.floating, self.calls = floating, calls
        self.parts: list[OnnxPart] = []
        self.reasons: dict[str, str] = {}
        self._inner: dict[str, list[Call]] | None = None
        self._attempts = 0

    def visit(self, name: str) -> None:
        """Take the module ``name`` as a part, or else the modules inside it."""
        module = self.floating.get_submodule(name)
        if any(_contains(part.name, name) for part in self.parts) or not weighted_layers(module):
            return
        if any(_contains(name, call.name) for call in self.calls if call.name != name):
            self.reasons[name] = "a part of it is called from outside too"
        elif own := self._calls_of(name):
            if self._attempts >= _ATTEMPTS:
                self.reasons[name] = f"{_ATTEMPTS} other parts were tried before"
                return
            self._attempts += 1
            try:
                self.parts.append(self._part(module, name, own))
                return
            except MissingExtraError:
                raise
            except Exception as error:  # exporters and user code raise anything
                self.reasons[name] = _told(error)
        for key, _ in module.named_children():
            self.visit(f"{name}.{key}" if name else key)

    def _part(self, module: nn.Module, name: str, own: Sequence[Call]) -> OnnxPart:
        exported = export_part(module, name, own)
        part = OnnxPart(name, exported.form, onnx_graph(exported, module), exported.inputs)
        runner = OnnxModule(graph_bytes(part.graph.model), part.form)
        with torch.no_grad():
            for call in (*own[:2], *([first_sample(own[0])] if _runs(module, first_sample(own[0])) else [])):
                expected, got = tensors_of(call_with(module, call)), tensors_of(call_with(runner, call))
                if not (error := relative_error(expected, got)) <= _TOLERANCE:
                    raise QuantizationError(
                        f"its graph differs from it by {error:.1e}: it asks for values of its input"
                    )
        return part

    def _calls_of(self, name: str) -> list[Call]:
        if own := [call for call in self.calls if call.name == name]:
            return own
        if self._inner is None:
            self._inner = _recorded(self.floating, self.calls)
        return self._inner.get(name, [])


def _recorded(root: nn.Module, calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The calls of every module inside ``root`` while ``calls`` are replayed."""
    found: dict[str, list[Call]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            found.setdefault(name, []).append(Call(name, args, dict(kwargs)))

        return hook

    handles = [
        module.register_forward_pre_hook(note(name), with_kwargs=True)
        for name, module in root.named_modules()
        if next(module.parameters(), None) is not None
    ]
    try:
        replay(root, calls)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _runs(module: nn.Module, call: Call) -> bool:
    try:
        call_with(module, call)
    except Exception:  # some networks need a full batch
        return False
    return True


def _contains(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, QuantizationError) else f"{type(error).__name__}: {text:.300}"
