"""Merges presets into one patch, and remembers which preset each setting came from.

Pure: it looks at nothing but its arguments. The rules:

- A preset that the user named beats one that a bundle merely includes; the nearer one wins in nested bundles.
- Two presets that are equally near and set one thing differently are a conflict; equal values are fine. One preset that
  sets one thing twice is a conflict too.
- One *thing* is a Trainer argument, a callback class, or a kind of plugin. The ``precision`` argument and a
  ``Precision`` plugin are one thing, and so are ``accumulate_grad_batches`` and a callback that schedules it,
  ``gradient_clip_val`` and a callback that clips, and all callbacks that average the weights: each of these is refused
  beside the other.
- Presets of which one cannot run beside the other are a conflict.
- The result is in the order of the registry, so the order in which names are given changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import LayerSync, Precision

from lightning_speedkit.errors import PresetConflictError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.optimize import AccumulationScheduler, AverageWeights, GradientClipping
from lightning_speedkit.registry import Part, Preset, Registry, TrainerPatch

__all__ = ["PRECISION", "Chosen", "Key", "Setting", "as_patch", "callback_key", "expand", "merge", "plugin_key"]

Key = tuple[str, type | None]
"""What a setting is about: a Trainer argument as ``("precision", None)``, a callback as ``("callbacks", itsclass)``."""

PRECISION: Key = ("precision", None)

_CALLBACK_KEYS: tuple[tuple[type, Key], ...] = (
    (AccumulationScheduler, ("accumulate_grad_batches", None)),
    (GradientAccumulationScheduler, ("accumulate_grad_batches", None)),
    (GradientClipping, ("gradient_clip_val", None)),
    (AverageWeights, ("callbacks", AverageWeights)),
    (WeightAveraging, ("callbacks", AverageWeights)),
    (StochasticWeightAveraging, ("callbacks", AverageWeights)),
)
_PLUGIN_KEYS: tuple[tuple[type, Key], ...] = (
    (Precision, PRECISION),
    (LayerSync, ("sync_batchnorm", None)),
    (CheckpointIO, ("plugins", CheckpointIO)),
    (ClusterEnvironment, ("plugins", ClusterEnvironment)),
)
_PRECISION_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A preset of a selection: ``depth`` is 0 where the user named it, 1 where a named bundle includes it, ...

    ``path`` are the names that lead to it, itself last.
    """

    preset: Preset
    path: tuple[str, ...]

    @property
    def depth(self) -> int:
        return len(self.path) - 1

    def describe(self) -> str:
        """The name as an error shows it: ``'precision-auto' (of 'cpu')``."""
        return repr(self.path[-1]) + (f" (of {self.path[0]!r})" if self.depth else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that a selection sets, with the presets that set it."""

    key: Key
    place: Literal["argument", "callback", "plugin"]
    name: str
    value: Any
    origins: tuple[Chosen, ...]

    def describe(self) -> str:
        """The value as an error shows it."""
        if isinstance(self.value, Part):
            given = ", ".join(f"{name}={value!r}" for name, value in self.value.arguments.items())
            return f"{self.value.cls.__name__}({given})"
        return f"{self.name}={self.value!r}"


def expand(names: Iterable[str], registry: Registry) -> tuple[Chosen, ...]:
    """The presets of these names and all that they include, each once, in the order of the registry.

    Raises :class:`UnknownPresetError` for a name that is not there, and ``ValueError`` for presets that include
    each other.

    >>> registry = Registry([
    ...     Preset(name="fp32", kind="precision", summary="full precision"),
    ...     Preset(name="plain", kind="bundle", summary="nothing special", includes=("fp32",)),
    ... ])
    >>> [(chosen.preset.name, chosen.depth) for chosen in expand(["plain"], registry)]
    [('fp32', 1), ('plain', 0)]
    """
    found: dict[str, Chosen] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"The presets include each other in a circle: {' -> '.join((*path, name))}.")
        chosen = Chosen(registry.get(name), (*path, name))
        if name not in found or chosen.depth < found[name].depth:
            found[name] = chosen
        for included in chosen.preset.includes:
            visit(included, chosen.path)

    for name in names:
        visit(name, ())
    return tuple(found[name] for name in registry.names() if name in found)


def merge(chosen: Sequence[Chosen], hardware: Hardware | None = None) -> tuple[Setting, ...]:
    """One setting per thing, or :class:`PresetConflictError` naming both presets, and both values or the reason.

    Args:
        chosen: What :func:`expand` returns.
        hardware: The machine to choose for. Without it, presets that depend on the hardware are left out.
    """
    _refuse_neighbours(chosen)
    settings: dict[Key, list[Setting]] = {}
    for one in chosen:
        patch = one.preset.patch
        if not isinstance(patch, TrainerPatch):
            if hardware is None:
                continue
            patch = patch(hardware)
        for setting in _settings(one, patch):
            settings.setdefault(setting.key, []).append(setting)
    return tuple(map(_settle, settings.values()))


def as_patch(settings: Iterable[Setting]) -> TrainerPatch:
    """The settings as one patch."""
    settings = tuple(settings)
    return TrainerPatch(
        arguments={setting.name: setting.value for setting in settings if setting.place == "argument"},
        callbacks=tuple(setting.value for setting in settings if setting.place == "callback"),
        plugins=tuple(setting.value for setting in settings if setting.place == "plugin"),
    )


def callback_key(cls: type) -> Key:
    """What a callback of this class sets."""
    return next((key for kind, key in _CALLBACK_KEYS if issubclass(cls, kind)), ("callbacks", cls))


def plugin_key(cls: type) -> Key:
    """What a plugin of this class sets; Lightning takes one plugin of a kind."""
    return next((key for kind, key in _PLUGIN_KEYS if issubclass(cls, kind)), ("plugins", cls))


def _refuse_neighbours(chosen: Sequence[Chosen]) -> None:
    by_name = {one.preset.name: one for one in chosen}
    for one in chosen:
        for name, reason in one.preset.not_beside.items():
            if name in by_name:
                raise PresetConflictError(
                    f"The presets {one.describe()} and {by_name[name].describe()} cannot be used in one run: {reason}."
                )


def _settings(origin: Chosen, patch: TrainerPatch) -> list[Setting]:
    settings = [
        Setting(key=(name, None), place="argument", name=name, value=value, origins=(origin,))
        for name, value in patch.arguments.items()
    ]
    for part in patch.callbacks:
        name, key = part.cls.__name__, callback_key(part.cls)
        settings.append(Setting(key=key, place="callback", name=name, value=part, origins=(origin,)))
    for part in patch.plugins:
        name, key = part.cls.__name__, plugin_key(part.cls)
        settings.append(Setting(key=key, place="plugin", name=name, value=part, origins=(origin,)))
    return settings


def _settle(settings: list[Setting]) -> Setting:
    """The one that holds, of settings of one thing: the nearest, which must agree."""
    origins = [setting.origins[0].preset.name for setting in settings]
    for place, setting in enumerate(settings):
        if origins[place] in origins[:place]:
            raise _conflict(settings[origins.index(origins[place])], setting)
    depth = min(setting.origins[0].depth for setting in settings)
    first, *others = (setting for setting in settings if setting.origins[0].depth == depth)
    for other in others:
        if first.place != other.place or not _equal(first, other):
            raise _conflict(first, other)
    return replace(first, origins=(*first.origins, *(other.origins[0] for other in others)))


def _conflict(one: Setting, other: Setting) -> PresetConflictError:
    what = one.key[0] if one.key[1] is None else f"{one.key[0]} ({one.key[1].__name__})"
    first, second = one.origins[0].describe(), other.origins[0].describe()
    if first == second:
        return PresetConflictError(
            f"The preset {first} sets {what} twice: {one.describe()} and {other.describe()}. Its patch has to set it "
            "once."
        )
    return PresetConflictError(
        f"The presets {first} and {second} set {what} differently: {first} sets {one.describe()}, "
        f"{second} sets {other.describe()}. Choose one of the two."
    )


def _equal(one: Setting, other: Setting) -> bool:
    if isinstance(one.value, Part) and isinstance(other.value, Part):
        return one.value.cls is other.value.cls and _equal_values(one.value.arguments, other.value.arguments)
    if one.name == "precision":
        values = [_PRECISION_ALIASES.get(str(setting.value), setting.value) for setting in (one, other)]
        return _equal_values(*values)
    return _equal_values(one.value, other.value)


def _equal_values(one: Any, other: Any) -> bool:
    # True == 1 in Python, but devices=1 and devices=True are not one choice; a list and a tuple are.
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal_values(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal_values, one, other))
    try:
        return one is other or bool(one == other)
    except Exception:  # an object that cannot say whether it equals another is not equal to it
        return False
