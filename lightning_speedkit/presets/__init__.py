"""Presets by name: what there is, and the Trainer arguments of a selection.

>>> from lightning_speedkit import presets
>>> "fp32" in presets.names()
True
>>> presets.get("fp32").kind
'precision'
>>> presets.trainer_kwargs("fp32")
{'precision': '32-true'}
"""

from __future__ import annotations

from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.for_trainer import trainer_kwargs
from lightning_speedkit.registry import Preset

__all__ = ["get", "names", "register", "trainer_kwargs"]


def names() -> tuple[str, ...]:
    """The names of all presets: the areas', then the bundles, then those that were registered.

    >>> {"fp32", "cpu", "low-memory"} <= set(names())
    True
    """
    return REGISTRY.names()


def get(name: str) -> Preset:
    """The preset of that name, as data; :class:`UnknownPresetError` with the nearest names if there is none.

    >>> get("cpu").includes
    ('precision-auto',)
    """
    return REGISTRY.get(name)


def register(preset: Preset, override: bool = False) -> None:
    """Add a preset of your own, for this process. From then on it can be selected by name everywhere.

    The same preset again is no error, so a module that registers one can be imported twice.

    Args:
        preset: What to add.
        override: Replace a preset of that name. Without it, another one under a taken name is a ``ValueError``.

    >>> register(get("fp32"))
    >>> register(Preset(name="fp32", kind="mine", summary="something else"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: A preset 'fp32' exists already ...
    """
    REGISTRY.register(preset, override=override)
