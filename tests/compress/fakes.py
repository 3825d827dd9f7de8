"""Engines that do what a test tells them to: what real ones do only on some machines, or only when they are broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.engine import Converted
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.int8 import weighted_layers


@dataclass
class FakeEngine:
    """Copies the network, and gives the copy and the names of the layers that it would quantize to ``change``."""

    name: str
    scheme: str = "static-int8"
    change: Callable[[nn.Module, tuple[str, ...]], Any] = lambda network, layers: None
    why_missing: str | None = None
    formats: tuple[str, ...] = ("onnx",)
    fails: Exception | None = None
    size: int | None = None
    made: list[tuple[str, ...]] = field(default_factory=list)

    __hash__ = object.__hash__

    def missing(self, device: str = "cpu") -> str | None:
        return self.why_missing

    def prepare(self, floating: nn.Module, calls: Sequence[Any], device: str = "cpu") -> Any:
        if self.fails is not None:
            raise self.fails
        return _Prepared(self, floating)


@dataclass
class _Prepared:
    engine: FakeEngine
    floating: nn.Module

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(weighted_layers(self.floating))

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        layers = tuple(name for name in self.layers if name not in skip)
        self.engine.made.append(layers)
        network = copy_module(self.floating)
        self.engine.change(network, layers)
        network.quantized_layers = layers  # type: ignore[assignment]
        size = self.engine.size or sum(100 if name in layers else 400 for name in self.layers)
        return Converted(
            network,
            self.engine.name,
            self.engine.scheme,
            () if self.engine.scheme == "float32" else layers,
            {name: "named in skip" for name in self.layers if name not in layers},
            {},
            {form: _File(size, form) for form in self.engine.formats},
        )


@dataclass
class _File:
    size: int
    form: str

    def write(self, folder: Path) -> dict[str, Any]:
        name = f"model.{self.form}"
        (folder / name).write_bytes(bytes(self.size))
        return {"files": [name]}


def rounded_to(step: float) -> Callable[[nn.Module, tuple[str, ...]], None]:
    """A change that rounds the weights of the layers to multiples of ``step``."""

    def change(network: nn.Module, layers: tuple[str, ...]) -> None:
        for name in layers:
            for weight in network.get_submodule(name).parameters(recurse=False):
                weight.data = (weight.data / step).round() * step

    return change


def answering(function: Callable[..., Any]) -> Callable[[nn.Module, tuple[str, ...]], None]:
    """A change after which the network answers with ``function(network, float_forward, x)``."""

    def change(network: nn.Module, layers: tuple[str, ...]) -> None:
        plain = type(network).forward

        def forward(self: nn.Module, x: torch.Tensor) -> Any:
            return function(self, lambda value: plain(self, value), x)

        network.__class__ = type(type(network).__name__, (type(network),), {"forward": forward})

    return change
