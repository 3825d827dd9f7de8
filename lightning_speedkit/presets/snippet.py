"""A selection of presets as text to paste: a Python line, and YAML for :class:`~lightning_speedkit.SpeedkitCLI`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.selection import trainer_argument_names

__all__ = ["python_line", "python_snippet", "yaml_snippet"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_IMPORTS = "from lightning.pytorch import Trainer\nfrom lightning_speedkit import trainer_kwargs\n"


def python_line(names: Sequence[str], arguments: Mapping[str, Any] = _NOTHING) -> str:
    """The line that makes the Trainer; ``Trainer`` and ``trainer_kwargs`` must have been imported.

    Args:
        names: Presets.
        arguments: Trainer arguments beside them: plain values, as they can be written in a file.

    Raises:
        UnknownPresetError: For a name that is not there.
        TypeError: For an argument that the Trainer does not have, or a value that cannot be written down.

    >>> python_line(["fp32"], {"max_epochs": 3})
    "trainer = Trainer(**trainer_kwargs('fp32', max_epochs=3))"
    """
    _check(names, arguments)
    written = [repr(name) for name in names] + [f"{name}={value!r}" for name, value in arguments.items()]
    return f"trainer = Trainer(**trainer_kwargs({', '.join(written)}))"


def python_snippet(names: Sequence[str], arguments: Mapping[str, Any] = _NOTHING) -> str:
    """:func:`python_line` with its imports: three lines that run.

    >>> print(python_snippet(["fp32"]))
    from lightning.pytorch import Trainer
    from lightning_speedkit import trainer_kwargs
    trainer = Trainer(**trainer_kwargs('fp32'))
    """
    return _IMPORTS + python_line(names, arguments)


def yaml_snippet(names: Sequence[str], arguments: Mapping[str, Any] = _NOTHING) -> str:
    """The same selection as the part of a config file that SpeedkitCLI reads. Arguments as in :func:`python_line`.

    >>> print(yaml_snippet(["fp32"], {"max_epochs": 3}))
    presets:
    - fp32
    trainer:
      max_epochs: 3
    """
    _check(names, arguments)
    config: dict[str, Any] = {"presets": list(names)}
    if arguments:
        config["trainer"] = dict(arguments)
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False).rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that looks like a number: jsonargparse reads ``1e-05`` as one, PyYAML does not."""


def _quoted_if_a_number(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _quoted_if_a_number)


def _check(names: Sequence[str], arguments: Mapping[str, Any]) -> None:
    for name in names:
        REGISTRY.get(name)
    known = trainer_argument_names()
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"The Trainer has no argument {name!r}.")
        if not _is_plain(value):
            raise TypeError(
                f"{name}={value!r} cannot be written down in a line of text; use a number, a string, "
                "a list or a dict of such."
            )


def _is_plain(value: Any) -> bool:
    """Whether the value is written in the same way in Python and in YAML, but for its form."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
