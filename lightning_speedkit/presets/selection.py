"""Presets against a machine and against what the user has set: what is left to add to the Trainer.

Builds no callback and no plugin, so it serves Python (:func:`trainer_kwargs`) and the command line alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_speedkit.errors import HardwareNeedError, PresetConflictError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure import read_hardware
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.merge import (
    PRECISION,
    Chosen,
    Key,
    Setting,
    as_patch,
    callback_key,
    expand,
    merge,
    plugin_key,
)
from lightning_speedkit.presets.needs import missing_extra, missing_needs
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = [
    "Given",
    "accelerator_of",
    "can_run",
    "hardware_for",
    "needs_left",
    "nodes_of",
    "settle",
    "trainer_argument_names",
]

_OWN_PRECISION = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceXLAStrategy, XLAStrategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user sets beside the presets; it wins over them.

    ``arguments`` are Trainer arguments other than callbacks and plugins; the accelerator and the strategy may be an
    object or its class. Of callbacks and plugins only the classes matter. ``keys`` are things that are set in another
    way, such as a precision plugin inside a strategy.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[type, ...] = ()
    plugins: tuple[type, ...] = ()
    keys: frozenset[Key] = frozenset()

    def replaces(self, setting: Setting) -> bool:
        """Whether the user has set what this setting is about."""
        if isinstance(setting.value, Part) and any(issubclass(cls, setting.value.cls) for cls in self.callbacks):
            return True
        keys: set[Key] = {(name, None) for name in self.arguments}
        keys |= {callback_key(cls) for cls in self.callbacks} | {plugin_key(cls) for cls in self.plugins} | self.keys
        return setting.key in keys


def settle(names: Iterable[str], given: Given) -> TrainerPatch:
    """What the presets of these names add to a Trainer, beneath what the user has given.

    Raises what :func:`~lightning_speedkit.presets.trainer_kwargs` raises.
    """
    chosen = expand(names, REGISTRY)
    settings = merge(chosen)  # a conflict that exists on any machine comes before the question what this machine is
    if any(callable(one.preset.patch) or one.preset.needs for one in chosen):
        accelerator = accelerator_of(settings, given)
        hardware = hardware_for(accelerator)
        if hardware is not None:
            settings = merge(chosen, hardware)
        _check_needs(chosen, settings, given, hardware, accelerator)
    patch = as_patch(setting for setting in settings if not given.replaces(setting))
    _check_arguments(patch, names)
    strategy = given.arguments.get("strategy", patch.arguments.get("strategy"))
    return _precision_as_argument(patch) if _brings_own_precision(strategy) else patch


def can_run(preset: Preset, hardware: Hardware) -> tuple[str, ...]:
    """What this machine lacks for the preset and what is used of those that it includes, in words; empty if nothing.

    >>> from lightning_speedkit.facts import Hardware
    >>> can_run(REGISTRY.get("fp16-mixed"), Hardware(accelerator="cpu", device_name="a CPU"))
    ('a GPU',)
    """
    chosen = expand([preset.name], REGISTRY)
    try:
        settings = merge(chosen, hardware)
        needs = dict.fromkeys(need for one in chosen for need in needs_left(one, settings, Given(), hardware))
    except PresetConflictError:  # it cannot be used at all, and says so when it is
        needs = dict.fromkeys(need for one in chosen for need in one.preset.needs)
    return missing_needs(needs, hardware)


def trainer_argument_names() -> tuple[str, ...]:
    """The names of the arguments of Lightning's Trainer."""
    return tuple(name for name in inspect.signature(Trainer.__init__).parameters if name != "self")


def accelerator_of(settings: Iterable[Setting], given: Given) -> str:
    """The name of the accelerator that the run uses, as far as it is said; else ``"auto"``."""
    chosen = {setting.name: setting.value for setting in settings if setting.place == "argument"}
    accelerator = given.arguments.get("accelerator", chosen.get("accelerator", "auto"))
    if isinstance(accelerator, Accelerator) or (isinstance(accelerator, type) and issubclass(accelerator, Accelerator)):
        return accelerator.name()
    return "auto" if accelerator is None else str(accelerator).lower()


def nodes_of(settings: Iterable[Setting], given: Given) -> int:
    """The number of machines that the run uses."""
    chosen = {setting.name: setting.value for setting in settings if setting.place == "argument"}
    return int(given.arguments.get("num_nodes", chosen.get("num_nodes", 1)))


def needs_left(
    one: Chosen, settings: Iterable[Setting], given: Given, hardware: Hardware | None = None
) -> tuple[str, ...]:
    """The needs of a preset, without those that a nearer preset or what the user has given makes pointless."""
    own = [setting for setting in settings if any(origin.preset is one.preset for origin in setting.origins)]
    replaced = [setting for setting in own if given.replaces(setting)]
    if len(replaced) == len(own) and _sets_something(one.preset, hardware):
        return ()  # nothing of it is used
    elsewhere = given.arguments.get("accelerator")
    if any(setting.key == ("accelerator", None) and setting.value != elsewhere for setting in replaced):
        return tuple(need for need in one.preset.needs if need.startswith("extra:"))  # it runs somewhere else
    return one.preset.needs


def hardware_for(accelerator: str) -> Hardware | None:
    """The machine as a Trainer with this accelerator sees it; None where that accelerator is not there.

    >>> hardware_for("cpu").accelerator, hardware_for("no such thing")
    ('cpu', None)
    """
    try:
        hardware = read_hardware(accelerator)
    except ValueError:
        return None
    if accelerator == "auto" and hardware.accelerator not in AcceleratorRegistry.available_accelerators():
        return read_hardware("cpu")  # Lightning's "auto" does not choose a device that it has no accelerator for
    return hardware


def _check_needs(
    chosen: tuple[Chosen, ...],
    settings: tuple[Setting, ...],
    given: Given,
    hardware: Hardware | None,
    accelerator: str,
) -> None:
    here = hardware or read_hardware("auto")
    nodes = nodes_of(settings, given)
    chosen = tuple(sorted(chosen, key=lambda one: one.depth))  # what the user named before what it includes
    for one in chosen:
        needs = needs_left(one, settings, given, hardware)
        if missing := missing_needs(needs, here, num_nodes=nodes):
            errors = [error for need in needs if (error := missing_extra(f"The preset {one.describe()}", need))]
            if len(errors) == len(missing):  # the machine would do
                raise errors[0]
            raise HardwareNeedError(
                f"The preset {one.describe()} needs {' and '.join(missing)}; this machine has {here.describe()}. "
                f"{_instead(one.preset, here)}"
            )
    if hardware is None:
        depending = next(one for one in chosen if callable(one.preset.patch) or one.preset.needs)
        raise HardwareNeedError(
            f"The preset {depending.describe()} depends on the hardware, and accelerator={accelerator!r} is not here "
            f"or not known; this machine has {here.describe()}. Choose another accelerator."
        )


def _sets_something(preset: Preset, hardware: Hardware | None) -> bool:
    """Whether a preset sets anything by itself; one that depends on hardware that is not here is unknown, so no."""
    if hardware is None and callable(preset.patch):
        return False
    patch = preset.patch_for(hardware) if hardware is not None else preset.patch
    return patch != TrainerPatch()


def _instead(preset: Preset, hardware: Hardware) -> str:
    wanted = _callbacks_of(preset, hardware)
    others = [
        repr(other.name)
        for other in REGISTRY
        if other.kind == preset.kind and other.name != preset.name and not can_run(other, hardware)
        if wanted & (theirs := _callbacks_of(other, hardware)) or not (wanted or theirs)
    ]
    return f"Use {' or '.join(others)} instead." if others else "Leave it out here."


def _callbacks_of(preset: Preset, hardware: Hardware) -> set[type]:
    return {part.cls for part in preset.patch_for(hardware).callbacks}


def _check_arguments(patch: TrainerPatch, names: Iterable[str]) -> None:
    known = set(trainer_argument_names()) - {"callbacks", "plugins"}
    if unknown := sorted(set(patch.arguments) - known):
        raise TypeError(
            f"The presets {', '.join(map(repr, names))} set {', '.join(map(repr, unknown))} among their arguments, "
            "which the Trainer does not take there; callbacks and plugins have fields of their own in a TrainerPatch."
        )


def _brings_own_precision(strategy: Any) -> bool:
    """Whether the strategy makes its own precision plugin from the ``precision`` argument, and refuses another."""
    if isinstance(strategy, str):
        name = strategy.lower()  # StrategyRegistry.get(name) would build one
        strategy = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else None
    cls = strategy if isinstance(strategy, type) else type(strategy)
    return issubclass(cls, _OWN_PRECISION)


def _precision_as_argument(patch: TrainerPatch) -> TrainerPatch:
    ours = [part for part in patch.plugins if plugin_key(part.cls) == PRECISION and "precision" in part.arguments]
    if not ours:
        return patch
    return TrainerPatch(
        arguments={**patch.arguments, "precision": ours[0].arguments["precision"]},
        callbacks=patch.callbacks,
        plugins=tuple(part for part in patch.plugins if part not in ours),
    )
