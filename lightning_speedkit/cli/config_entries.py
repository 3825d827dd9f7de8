"""Reads what a parsed LightningCLI config says about the things that presets set."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.cli import Namespace  # type: ignore[attr-defined]

from lightning_speedkit.errors import nearest_names
from lightning_speedkit.presets.merge import PRECISION, Key, Setting
from lightning_speedkit.presets.selection import Given

__all__ = [
    "Namespace",
    "as_namespace",
    "class_of",
    "entries",
    "explicit_settings",
    "hint_of_presets",
    "marks_for",
    "split_names",
]

_UNKNOWN = re.compile(r"(?:[Oo]ption '|option: --|arguments: --|[Kk]ey ')([\w.-]+)")  # as jsonargparse tells of one
_READ_BY_PRESETS = ("accelerator", "strategy", "num_nodes")  # they matter whether or not a preset sets them
_ONE_THING_IN_TWO_WAYS: Mapping[str, tuple[Any, Any]] = {  # an argument, and a plugin or callback that sets the same
    "precision": ("32-true", "64-true"),
    "accumulate_grad_batches": (1, 2),
    "sync_batchnorm": (True, False),
}


def as_namespace(value: Any) -> Any:
    """A config read from YAML in the form of a parsed one; a dict that is a value, with other keys, stays a dict.

    >>> as_namespace({"trainer": {"devices": 1}, "schedule": {0: 4}})
    Namespace(trainer=Namespace(devices=1), schedule={0: 4})
    """
    if isinstance(value, dict) and all(isinstance(key, str) and key.isidentifier() for key in value):
        return Namespace(**{key: as_namespace(item) for key, item in value.items()})  # type: ignore[no-untyped-call]
    return value


def split_names(value: Any) -> list[str]:
    """The names in a ``presets`` value, each once: a list, or text with commas, or a list of such.

    >>> split_names("fp32, accumulate-4"), split_names(["fp32,ddp", "ddp"]), split_names(None)
    (['fp32', 'accumulate-4'], ['fp32', 'ddp'], [])
    """
    texts = [] if value is None else [value] if isinstance(value, str) else list(value)
    names = (name.strip() for text in texts for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def entries(trainer: Namespace | Mapping[str, Any], key: str) -> list[Any]:
    """``trainer.callbacks`` or ``trainer.plugins`` as a list."""
    value = trainer.get(key)
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def class_of(entry: Any) -> type | None:
    """The class of an object, or of its ``class_path`` entry, also one inside a class; None where that is not a class.

    >>> class_of({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}).__name__
    'ModelCheckpoint'
    """
    if not isinstance(entry, (Namespace, Mapping, str)):
        return type(entry)
    path = entry if isinstance(entry, str) else entry.get("class_path")
    try:
        found = pkgutil.resolve_name(str(path))
    except (ImportError, AttributeError, ValueError):  # no such module, nothing of that name in it, no path at all
        return None
    return found if isinstance(found, type) else None


def hint_of_presets(message: str) -> str:
    """What is added to the parser's error of an unknown key or option that looks like ``presets``; else nothing.

    >>> hint_of_presets("Option 'trainer.preset' is not accepted")
    '; did you mean presets? It stands beside trainer and model, not in them.'
    """
    found = _UNKNOWN.search(message)
    key = "" if found is None else found[1].rpartition(".")[2]
    if not nearest_names(key, ["presets"]):
        return ""
    return "; did you mean presets? It stands beside trainer and model, not in them."


def marks_for(settings: Iterable[Setting], trainer: Namespace) -> dict[str, Any]:
    """Other defaults for what presets may set: after a parse with them, what is given explicitly is unchanged."""
    marks = {setting.name: setting.value for setting in settings if setting.place == "argument"}
    for name, values in _ONE_THING_IN_TWO_WAYS.items():
        marks[name] = next(value for value in values if value != trainer.get(name))
    return {name: mark for name, mark in marks.items() if name in trainer and mark != trainer[name]}


def explicit_settings(trainer: Namespace, marked: Namespace, marks: Mapping[str, Any]) -> Given:
    """What is given explicitly: ``trainer`` and ``marked`` are two parses, the second with ``marks`` as defaults."""
    arguments = {name: trainer[name] for name in marks if trainer[name] == marked[name]}
    for name in _READ_BY_PRESETS:
        if name in trainer and name not in marks:
            arguments[name] = trainer[name]
    strategy = arguments.get("strategy")
    inside = (strategy.get("init_args") or {}) if isinstance(strategy, (Namespace, Mapping)) else {}
    if inside.get("accelerator") and arguments.get("accelerator", "auto") == "auto":
        arguments["accelerator"] = inside["accelerator"]  # Lightning refuses to be told a second time
    for name in ("accelerator", "strategy"):
        if name in arguments and not isinstance(arguments[name], str):
            arguments[name] = class_of(arguments[name]) or arguments[name]
    keys: frozenset[Key] = frozenset({PRECISION} if inside.get("precision_plugin") else ())
    return Given(
        arguments=arguments,
        callbacks=tuple(filter(None, map(class_of, entries(trainer, "callbacks")))),
        plugins=tuple(filter(None, map(class_of, entries(trainer, "plugins")))),
        keys=keys,
    )
