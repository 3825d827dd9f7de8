"""Lets a module take the sizes of a checkpoint whose network was shrunk, or was not yet.

A LightningModule that was shrunk keeps the shapes that it had before, marks every checkpoint of itself with them, and
takes the sizes of the checkpoint before it loads one. A fresh module does the same if :func:`resize_to` is called in
its ``on_load_checkpoint``, which Lightning runs before the weights are loaded. Only tensors that the mark names are
resized, so a checkpoint of another network still fails to load with torch's own message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_speedkit.compress.shrink_sizes import named_tensors, set_sizes, tensor_sizes

__all__ = ["SHRUNK_KEY", "follow_checkpoints", "load_shrunk", "original_sizes", "resize_to", "set_original_sizes"]

SHRUNK_KEY = "speedkit_shrunk"
_ATTRIBUTE = "_speedkit_shrunk"
ModuleT = TypeVar("ModuleT", bound=pl.LightningModule)


def resize_to(module: nn.Module, checkpoint: Mapping[str, Any]) -> list[str]:
    """Gives ``module`` the sizes of ``checkpoint`` and returns the names of the tensors that changed.

    ``checkpoint`` is one of Lightning, or a state dict. Of a Lightning checkpoint only the tensors that its mark names
    are resized, and those of an earlier mark of the module; of a state dict all whose shape differs. The new values are
    zeros, to be loaded afterwards. Call it before an optimizer is made.

    >>> small, fresh = nn.Linear(4, 2), nn.Linear(4, 8)
    >>> resize_to(fresh, small.state_dict())
    ['weight', 'bias']
    >>> fresh.out_features, fresh.load_state_dict(small.state_dict())
    (2, <All keys matched successfully>)
    """
    state, before = checkpoint, original_sizes(module)
    marked: Mapping[str, Sequence[int]] | None = None
    if isinstance(checkpoint.get("state_dict"), Mapping):
        state = checkpoint["state_dict"]
        marked = {**before, **checkpoint.get(SHRUNK_KEY, {})}
    here = tensor_sizes(module)
    wanted = {
        name: list(state[name].shape)
        for name, size in here.items()
        if (marked is None or name in marked)
        and isinstance(state.get(name), Tensor)
        and len(state[name].shape) == len(size)
        and list(state[name].shape) != size
    }
    set_sizes(module, wanted)
    if marked is not None and isinstance(module, pl.LightningModule):
        full = {**{name: here[name] for name in wanted}, **marked}
        now = tensor_sizes(module)
        set_original_sizes(module, {name: size for name, size in full.items() if now.get(name) != list(size)})
        if original_sizes(module):
            follow_checkpoints(module)
    return list(wanted)


def load_shrunk(cls: type[ModuleT], path: Any, arguments: Mapping[str, Any] | None = None) -> ModuleT:
    """A module of ``cls`` from the checkpoint of a shrunk one: ``cls.load_from_checkpoint(path, **arguments)`` with the
    sizes of the checkpoint. ``cls`` needs no line for it."""

    def on_load(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        resize_to(module, checkpoint)
        cls.on_load_checkpoint(module, checkpoint)

    resizing: Any = type(cls.__name__, (cls,), {"on_load_checkpoint": on_load, "__module__": cls.__module__})
    loaded: ModuleT = resizing.load_from_checkpoint(path, **(arguments or {}))
    loaded.__class__ = cls
    return loaded


def original_sizes(module: nn.Module) -> dict[str, list[int]]:
    """The shapes that tensors of ``module`` had before it was shrunk; empty if it has its own size."""
    return dict(vars(module).get(_ATTRIBUTE, {}))


def set_original_sizes(module: nn.Module, sizes: Mapping[str, Sequence[int]]) -> None:
    """Keeps in ``module`` which shapes its tensors had."""
    if sizes:
        vars(module)[_ATTRIBUTE] = {name: list(size) for name, size in sizes.items()}
    else:
        vars(module).pop(_ATTRIBUTE, None)


def follow_checkpoints(module: pl.LightningModule, on: bool = True) -> None:
    """Lets this one module mark the checkpoints that are made of it, and resize itself to those that it loads."""
    for hook in (on_save_checkpoint, on_load_checkpoint):
        held = vars(module).get(hook.__name__)
        ours = isinstance(held, MethodType) and held.__func__ is hook
        if on and held is None:
            vars(module)[hook.__name__] = MethodType(hook, module)
        elif not on and ours:
            del vars(module)[hook.__name__]


def on_save_checkpoint(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Marks the checkpoint, then goes on with the hook of the class."""
    mark(module, checkpoint)
    type(module).on_save_checkpoint(module, checkpoint)


def on_load_checkpoint(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Resizes the module, then goes on with the hook of the class."""
    resize_to(module, checkpoint)
    type(module).on_load_checkpoint(module, checkpoint)


def mark(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Writes into a checkpoint of ``module`` which of its tensors were larger before; nothing if none was."""
    state = checkpoint.get("state_dict", {})
    names = named_tensors(module)
    sizes = {name: size for name, size in original_sizes(module).items() if name in names and name in state}
    if sizes:
        checkpoint[SHRUNK_KEY] = sizes
