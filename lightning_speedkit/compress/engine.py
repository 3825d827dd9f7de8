"""The engines that can quantize a network, what each needs, and which of them is tried first on a device.

An engine is a runtime with one scheme. ONNX Runtime comes first on a CPU, ``torch.ao`` while torch still has it is
second, and ``torchao`` only makes the file smaller there: its int8 weights are turned back into float at each call. On
CUDA it is ``torchao`` with ``torch.compile``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.choice import check_choice

__all__ = [
    "ENGINES",
    "FLOAT32",
    "FORMATS",
    "SCHEMES",
    "Artefact",
    "Converted",
    "Engine",
    "Prepared",
    "engine_named",
    "engines_for",
    "float_engine",
]

SCHEMES = ("auto", "dynamic-int8", "static-int8", "weight-only-int8", "weight-only-int4", "fp8")
FLOAT32 = "float32"  # the scheme of what is only measured beside: the same runtime without quantization
FORMATS = ("state_dict", "pt2", "onnx")
_FUNCTIONS = "lightning_speedkit.compress."


class Artefact(Protocol):
    """How a converted network is written in one format; ``artefact_folder.py`` makes a folder of it."""

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write the files into ``folder``, which exists, and return what the manifest has to say of them.

        ``{"files": ["model.onnx"], ...}``: plain values, all that :func:`load_quantized` needs in a fresh process.
        """
        ...  # pragma: no cover


@dataclass(slots=True)
class Converted:
    """A network that an engine has converted.

    ``module`` is called as the float network that it was made from, in eval mode, and answers with tensors in the same
    structure; it can be deep-copied. ``quantized`` names the layers with a weight of two or more dimensions that are
    quantized now, ``skipped`` says of every other one why it is not. ``recipe`` is plain data about how it was made.
    ``artefacts`` has a writer for each format that this engine can keep the network in.
    """

    module: nn.Module
    engine: str
    scheme: str
    quantized: tuple[str, ...]
    skipped: dict[str, str]
    recipe: dict[str, Any]
    artefacts: dict[str, Artefact]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that :meth:`save` can write, the preferred one first."""
        return tuple(self.artefacts)

    @property
    def bytes(self) -> int:
        """The bytes of the files that :meth:`save` writes in the preferred format, without the manifest."""
        from lightning_speedkit.compress.artefact_folder import artefact_bytes

        return artefact_bytes(self)

    def save(self, folder: str | Path, formats: Sequence[str] | None = None) -> dict[str, Any]:
        """Write the network to ``folder`` and return the manifest, which ``manifest.json`` holds there too.

        ``formats`` are some of :attr:`formats`, by default the first one. A file gets its name when it is complete.
        ValueError for a format that this engine cannot write.
        """
        from lightning_speedkit.compress.artefact_folder import save_artefacts

        return save_artefacts(self, Path(folder), formats)


class Prepared(Protocol):
    """A network that is exported and calibrated, so that it can be converted several times with other layers skipped.

    That is what a search for the layers that hurt most needs: :meth:`convert` costs little, preparing costs much.
    """

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that this engine can quantize in this network, in the order of ``named_modules``."""
        ...  # pragma: no cover

    def convert(self, skip: Sequence[str] = ()) -> Converted:
        """The network with the layers that ``skip`` names left in float; ``*`` and ``?`` are wildcards.

        A name also stands for all that is inside it. QuantizationError if that is not possible, or leaves nothing.
        """
        ...  # pragma: no cover


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to convert a network.

    ``name`` is such as ``"onnxruntime-static"``; ``devices`` are the kinds of device that it converts for. ``faster``
    says for which of them it can be expected to be faster than float; on the others it is for the size alone.
    """

    name: str
    scheme: str
    devices: tuple[str, ...]
    faster: tuple[str, ...]
    formats: tuple[str, ...]
    _module: str
    _arguments: tuple[tuple[str, Any], ...] = ()

    def missing(self, device: str = "cpu") -> str | None:
        """Why this engine cannot work for ``device`` here, with the line that cures it; ``None`` if it can."""
        if device not in self.devices:
            return f"{self.name} is for {' and '.join(self.devices)}, not for {device}"
        found: Callable[..., str | None] = self._function("missing")
        return found(device, **dict(self._arguments))

    def prepare(self, floating: nn.Module, calls: Sequence[Call], device: str = "cpu") -> Prepared:
        """Export ``floating`` (a :func:`float_copy`, which stays as it is) and calibrate it on ``calls``.

        Raises:
            QuantizationError: The network cannot be exported or calibrated; the message says what blocks it.
            MissingExtraError: A library is not installed.
        """
        function: Callable[..., Prepared] = self._function("prepare")
        return function(floating, calls, device, **dict(self._arguments))

    def convert(
        self, floating: nn.Module, calls: Sequence[Call], skip: Sequence[str] = (), device: str = "cpu"
    ) -> Converted:
        """``floating`` converted, calibrated on ``calls``, with the layers that ``skip`` names left in float."""
        return self.prepare(floating, calls, device).convert(skip)

    def _function(self, name: str) -> Callable[..., Any]:
        # an engine is imported when it is used: torchao and onnxruntime are slow and loud to import
        return cast("Callable[..., Any]", getattr(importlib.import_module(_FUNCTIONS + self._module), name))


_CPU, _CUDA, _BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")

ENGINES: tuple[Engine, ...] = (
    Engine("onnxruntime-static", "static-int8", _CPU, _CPU, ("onnx",), "onnx_engine", (("scheme", "static-int8"),)),
    Engine("onnxruntime-dynamic", "dynamic-int8", _CPU, _CPU, ("onnx",), "onnx_engine", (("scheme", "dynamic-int8"),)),
    Engine("torch-ao-static", "static-int8", _CPU, _CPU, ("state_dict",), "ao_engine", (("scheme", "static-int8"),)),
    Engine("torch-ao-dynamic", "dynamic-int8", _CPU, _CPU, ("state_dict",), "ao_engine", (("scheme", "dynamic-int8"),)),
    Engine(
        "torchao-dynamic-int8",
        "dynamic-int8",
        _CUDA,
        _CUDA,
        ("state_dict",),
        "torchao_engine",
        (("scheme", "dynamic-int8"),),
    ),
    Engine(
        "torchao-weight-int8",
        "weight-only-int8",
        _BOTH,
        _CUDA,
        ("state_dict", "pt2"),
        "torchao_engine",
        (("scheme", "weight-only-int8"),),
    ),
    Engine(
        "torchao-weight-int4",
        "weight-only-int4",
        _BOTH,
        _CUDA,
        ("state_dict", "pt2"),
        "torchao_engine",
        (("scheme", "weight-only-int4"),),
    ),
    Engine("torchao-fp8", "fp8", _CUDA, _CUDA, ("state_dict",), "torchao_engine", (("scheme", "fp8"),)),
    Engine("onnxruntime-float32", FLOAT32, _CPU, _CPU, ("onnx",), "onnx_engine", (("scheme", FLOAT32),)),
)


def engines_for(scheme: str, device: str = "cpu", objective: str = "latency") -> tuple[Engine, ...]:
    """The engines to try for ``scheme``, in order; whether one can work here is what :meth:`Engine.missing` says.

    For ``"auto"`` and ``objective="latency"`` only those are named that can be faster than float on ``device``; with
    ``objective="size"`` the others follow.

    >>> [engine.name for engine in engines_for("auto")]
    ['onnxruntime-static', 'onnxruntime-dynamic', 'torch-ao-static', 'torch-ao-dynamic']
    >>> [engine.name for engine in engines_for("weight-only-int8")]
    ['torchao-weight-int8']
    """
    check_choice("scheme", scheme, SCHEMES)
    check_choice("device", device, _BOTH)
    check_choice("objective", objective, ("latency", "size"))
    if scheme != "auto":
        named = [engine for engine in ENGINES if engine.scheme == scheme]
        return tuple([e for e in named if device in e.devices] or named)
    able = [engine for engine in ENGINES if device in engine.devices and engine.scheme != FLOAT32]
    first = [engine for engine in able if device in engine.faster]
    return tuple(first if objective == "latency" else [*first, *(e for e in able if e not in first)])


def engine_named(name: str) -> Engine:
    """The engine of that name.

    >>> engine_named("torch-ao-dynamic").scheme
    'dynamic-int8'
    """
    known = {engine.name: engine for engine in ENGINES}
    check_choice("backend", name, tuple(known))
    return known[name]


def float_engine(engine: Engine) -> Engine | None:
    """The engine that runs the same network in float32 in the runtime of ``engine``; ``None`` if that is torch itself.

    >>> float_engine(engine_named("onnxruntime-static")).name
    'onnxruntime-float32'
    """
    runtime = engine.name.partition("-")[0]
    return next((e for e in ENGINES if e.scheme == FLOAT32 and e.name.startswith(f"{runtime}-")), None)
