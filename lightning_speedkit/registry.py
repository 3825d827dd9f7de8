"""Presets as data: what a named preset adds to a Trainer, and the table that finds one by name."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_speedkit.errors import UnknownPresetError, did_you_mean
from lightning_speedkit.facts import Hardware

__all__ = ["Part", "Preset", "Registry", "TrainerPatch"]


@dataclass(frozen=True, slots=True)
class Part:
    """An object still to be built: printable, comparable, and sendable to another process.

    >>> from fractions import Fraction
    >>> part = Part(Fraction, {"numerator": 1, "denominator": 4})
    >>> part.build()
    Fraction(1, 4)
    >>> part.config()
    {'class_path': 'fractions.Fraction', 'init_args': {'numerator': 1, 'denominator': 4}}
    """

    cls: type
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """A new object; the arguments are copied, so two builds share nothing."""
        return self.cls(**copy.deepcopy(dict(self.arguments)))

    def class_path(self) -> str:
        """The shortest import path of the class."""
        module, name = self.cls.__module__, self.cls.__qualname__
        package = module.partition(".")[0]
        if getattr(sys.modules.get(package), name, None) is self.cls:
            return f"{package}.{name}"
        return f"{module}.{name}"

    def config(self) -> dict[str, Any]:
        """The form that LightningCLI reads: ``class_path`` and ``init_args``."""
        config: dict[str, Any] = {"class_path": self.class_path()}
        if self.arguments:
            config["init_args"] = copy.deepcopy(dict(self.arguments))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPatch:
    """What a preset adds to ``Trainer(...)``: arguments, callbacks and plugins."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Part, ...] = ()
    plugins: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named choice of settings.

    ``kind`` is the area it belongs to, or ``"bundle"``. ``includes`` names presets that are merged first. ``patch``
    is data, or a function of the hardware that returns data. ``needs`` lists what must be there, checked before
    anything is built:

    ======================  =====================================================================
    ``"cuda"``              a CUDA (or ROCm) device
    ``"gpu"``               any accelerator
    ``"capability>=8.0"``   on CUDA, at least that compute capability; no demand elsewhere
    ``"native-bf16"``       bfloat16 in hardware; on CUDA no demand, the capability tells
    ``"devices>=2"``        that many accelerators; a CPU can run any number of processes
    ``"extra:quant"``       the libraries of that extra of this package
    ======================  =====================================================================

    ``not_beside`` are names of presets that its callbacks refuse in one run, each with the reason: named together they
    are an error before anything is built.
    """

    name: str
    kind: str
    summary: str
    patch: TrainerPatch | Callable[[Hardware], TrainerPatch] = TrainerPatch()
    includes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    not_beside: Mapping[str, str] = field(default_factory=dict)

    def patch_for(self, hardware: Hardware) -> TrainerPatch:
        """The preset's own patch on this hardware, without what it includes."""
        return self.patch(hardware) if callable(self.patch) else self.patch


class Registry:
    """Presets by name, in the order in which they were added.

    >>> registry = Registry([Preset(name="fp32", kind="precision", summary="full precision")])
    >>> registry.names()
    ('fp32',)
    >>> registry.get("fp23")
    Traceback (most recent call last):
        ...
    lightning_speedkit.errors.UnknownPresetError: There is no preset 'fp23'. Did you mean 'fp32'? Known: fp32.
    """

    def __init__(self, presets: Iterable[Preset] = ()) -> None:
        self._presets: dict[str, Preset] = {}
        for preset in presets:
            self.register(preset)

    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(self._presets)

    def get(self, name: str) -> Preset:
        """The preset of that name; :class:`UnknownPresetError` with the nearest names if there is none."""
        try:
            return self._presets[name]
        except (KeyError, TypeError):
            if isinstance(name, str) and "," in name:
                each = ", ".join(repr(part.strip()) for part in name.split(",") if part.strip())
                raise UnknownPresetError(f"{name!r} is not one preset; give each name by itself: {each}.") from None
            hint = did_you_mean(name, self._presets, most=3, cutoff=0.5)
            raise UnknownPresetError(f"There is no preset {name!r}.{hint} Known: {', '.join(self._presets)}.") from None

    def register(self, preset: Preset, *, override: bool = False) -> None:
        """Add a preset. The same preset again is no error; another one under a taken name is, unless ``override``."""
        if not isinstance(preset, Preset):
            raise TypeError(f"register() takes a Preset, got {type(preset).__name__}.")
        taken = self._presets.get(preset.name)
        if taken is not None and taken != preset and not override:
            raise ValueError(
                f"A preset {preset.name!r} exists already ({taken.summary}). "
                f"Choose another name, or pass override=True to replace it."
            )
        self._presets[preset.name] = preset

    def __iter__(self) -> Iterator[Preset]:
        return iter(self._presets.values())

    def __contains__(self, name: object) -> bool:
        return name in self._presets
