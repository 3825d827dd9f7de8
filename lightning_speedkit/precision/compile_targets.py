"""Which modules of a model are compiled: the networks it holds, its repeated blocks, or those that are named.

A compiled region begins where a module is called. What calls ``self.log``, a step of a LightningModule, stays outside,
so a LightningModule itself is never taken, only what it holds. Of nested modules the outermost is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from lightning_speedkit.errors import nearest_names

__all__ = ["checked_modules", "compile_targets"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHOWN = 12  # of the names in a message


def compile_targets(model: nn.Module, modules: str | Sequence[str] = "auto") -> tuple[str, ...]:
    """The paths of the modules to compile, in the order of ``named_modules``, none inside another.

    Args:
        model: The model to look in.
        modules: ``"auto"``: of a LightningModule the networks with parameters that it holds, of another model the
            model itself, whose path is ``""``. ``"blocks"``: modules of one class of which a container holds two or
            more. Or one or more class names, paths, or globs of paths in which ``*`` stands for one name.

    Raises:
        ValueError: If nothing is found, or what is named is never called as a module.
        TypeError: If ``modules`` is neither a string nor a list of strings.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> model = nn.Sequential(nn.Linear(4, 4), block(), block())
    >>> compile_targets(model), compile_targets(model, "blocks"), compile_targets(model, ["Linear"])
    (('',), ('1', '2'), ('0', '1.0', '2.0'))
    """
    wanted = checked_modules(modules)
    if wanted == ("auto",):
        found = list(_networks(model, "")) if isinstance(model, pl.LightningModule) else [""]
    elif wanted == ("blocks",):
        found = list(_blocks(model, ""))
    else:
        found = [path for entry in wanted for path in _named(model, entry)]
    if not found:
        raise ValueError(
            f"modules={modules!r} found nothing to compile in {type(model).__name__}. Name a class or a path. "
            f"{_inventory(model)}"
        )
    return tuple(
        path
        for path, _ in model.named_modules()
        if path in found and not any(outer != path and _holds(outer, path) for outer in found)
    )


def checked_modules(modules: str | Sequence[str]) -> tuple[str, ...]:
    """The entries as a tuple of strings, or what is wrong with them.

    >>> checked_modules("Block")
    ('Block',)
    """
    entries = (modules,) if isinstance(modules, str) else modules
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise TypeError(f"modules is a name or a list of names of modules, got {modules!r}.")
    if not entries or not all(entry.strip() for entry in entries):
        raise ValueError(f"modules={modules!r} names nothing; give 'auto', 'blocks', class names or paths.")
    for word in ("auto", "blocks"):
        if word in entries and len(entries) > 1:
            raise ValueError(f"modules={modules!r} mixes {word!r} with names; give {word!r} alone, or names.")
    return tuple(entries)


def _holds(outer: str, path: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def _networks(parent: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in parent.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, Metric) or next(child.parameters(), None) is None:
            continue
        if _is_never_called(child) or isinstance(child, pl.LightningModule):
            yield from _networks(child, path)
        elif _is_plain(child):
            yield path


def _blocks(parent: nn.Module, prefix: str) -> Iterator[str]:
    count: Counter[type] = Counter()
    if isinstance(parent, _CONTAINERS):
        count.update(type(child) for child in set(parent.children()))
    for name, child in parent.named_children():
        path = f"{prefix}.{name}" if prefix else name
        inner = list(_blocks(child, path))
        has_parts = next(child.children(), None) is not None and next(child.parameters(), None) is not None
        repeated = count[type(child)] >= 2 and has_parts and not _is_never_called(child) and _is_plain(child)
        if repeated and not (type(child) is nn.Sequential and inner):
            yield path
        else:
            yield from inner


def _named(model: nn.Module, entry: str) -> list[str]:
    found = []
    for path, module in model.named_modules():
        if type(module).__name__ != entry and not _is_at(path, entry):
            continue
        if _is_never_called(module):
            raise ValueError(
                f"modules: {path!r} is a {type(module).__name__}, which is never called. "
                f"Take what it holds: '{path}.*'."
            )
        if isinstance(module, pl.LightningModule):
            raise ValueError(
                f"modules: {entry!r} is the LightningModule, whose steps stay eager so that self.log works. "
                f"Take what it holds. {_inventory(model)}"
            )
        if not _is_plain(module):
            raise ValueError(f"modules: {path!r} is compiled already, by torch.compile or as TorchScript.")
        found.append(path)
    if not found:
        raise ValueError(f"modules: there is no class and no path {entry!r} in the model. {_inventory(model, entry)}")
    return found


def _is_at(path: str, entry: str) -> bool:
    names, patterns = path.split("."), entry.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _is_never_called(module: nn.Module) -> bool:
    return isinstance(module, _LISTS) and type(module).forward is nn.Module.forward


def _is_plain(module: nn.Module) -> bool:
    wrapped = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return not (wrapped or isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None)


def _inventory(model: nn.Module, near: str = "") -> str:
    count = Counter(type(module).__name__ for path, module in model.named_modules() if path)
    paths = [path for path, module in model.named_modules() if path and not _is_never_called(module)]
    if not paths:
        return "The model has no submodules."
    alike = nearest_names(near, [*count, *paths], most=3) if near else []
    hint = f"Did you mean {' or '.join(map(repr, alike))}? " if alike else ""
    paths.sort(key=lambda path: path.count("."))  # the outer ones first
    classes = _some([f"{name} (x{number})" for name, number in count.most_common()])
    return f"{hint}Classes: {classes}. Paths: {_some(paths)}."


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
