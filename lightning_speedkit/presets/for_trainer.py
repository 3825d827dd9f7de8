"""Presets by name, as the keyword arguments of a Trainer."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import Strategy

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.presets.merge import PRECISION, Key
from lightning_speedkit.presets.selection import Given, settle, trainer_argument_names

__all__ = ["trainer_kwargs"]


def trainer_kwargs(*names: str, **overrides: Any) -> dict[str, Any]:
    """The keyword arguments of a Trainer for these presets: ``Trainer(**trainer_kwargs("cpu", max_epochs=3))``.

    Every call builds new callbacks and plugins, and leaves what it was given unchanged. The order of the names does
    not matter.

    Args:
        *names: Presets, see :func:`lightning_speedkit.presets.names`. One that is named beats one that a named bundle
            merely includes.
        **overrides: Arguments of the Trainer. They win over the presets, also where they equal the Trainer's default:
            ``precision=...`` drops a preset's precision plugin, and a precision plugin drops a preset's ``precision``.
            ``callbacks`` and ``plugins`` are added to those of the presets; one of the same class (for plugins: of the
            same kind) replaces the preset's.

    Raises:
        UnknownPresetError: There is no preset of that name; the message has the nearest.
        PresetConflictError: Two named presets set one thing differently, whatever the hardware.
        HardwareNeedError: This machine lacks what a preset needs.
        MissingExtraError: Only libraries are missing.
        TypeError: An override is no argument of the Trainer.

    >>> trainer_kwargs("fp32", max_epochs=3)
    {'precision': '32-true', 'max_epochs': 3}
    >>> trainer_kwargs("fp32", precision="64-true")
    {'precision': '64-true'}
    """
    _check(names, overrides)
    own = {name: _as_list(overrides.get(name)) for name in ("callbacks", "plugins")}
    arguments = {name: _copied(value) for name, value in overrides.items() if name not in own}
    strategy = arguments.get("strategy")
    given = Given(
        arguments={**_accelerator_inside(strategy), **arguments},
        callbacks=tuple(type(callback) for callback in own["callbacks"]),
        plugins=tuple(type(plugin) for plugin in own["plugins"]),
        keys=_keys_inside(strategy),
    )
    patch = settle(names, given)
    kwargs = {**copy.deepcopy(dict(patch.arguments)), **arguments}
    for name, parts in (("callbacks", patch.callbacks), ("plugins", patch.plugins)):
        objects = [*(part.build() for part in parts), *own[name]]
        if objects or name in overrides:
            kwargs[name] = objects
    return _with_accelerator_by_name(kwargs)


def _check(names: tuple[str, ...], overrides: dict[str, Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"trainer_kwargs() takes the names of presets one by one, as strings; got {type(name).__name__}. "
                "Write trainer_kwargs(*names) for a list."
            )
    known = trainer_argument_names()
    for name in overrides:
        if name not in known:
            raise TypeError(f"The Trainer has no argument {name!r}.{did_you_mean(name, known)}")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _copied(value: Any) -> Any:
    """A container is copied, so that the caller's stays as it is; an object in it or beside it is the caller's own."""
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _keys_inside(strategy: Any) -> frozenset[Key]:
    """What a strategy object sets by itself; Lightning refuses to be told a second time."""
    # A strategy without a precision plugin of its own answers with a new default object each time.
    has_plugin = isinstance(strategy, Strategy) and strategy.precision_plugin is strategy.precision_plugin
    return frozenset({PRECISION}) if has_plugin else frozenset()


def _accelerator_inside(strategy: Any) -> dict[str, Any]:
    accelerator = strategy.accelerator if isinstance(strategy, Strategy) else None
    return {} if accelerator is None else {"accelerator": accelerator}


def _with_accelerator_by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Lightning 2.6 makes a CUDA autocast plugin for ``accelerator=CPUAccelerator(), precision="bf16-mixed"``.

    By the accelerator's name it makes the right one, and these accelerators have no state to lose.
    """
    accelerator = kwargs.get("accelerator")
    by_name: dict[type, str] = {CPUAccelerator: "cpu", CUDAAccelerator: "cuda", MPSAccelerator: "mps"}
    if kwargs.get("precision") is not None and type(accelerator) in by_name:
        return {**kwargs, "accelerator": by_name[type(accelerator)]}
    return kwargs
