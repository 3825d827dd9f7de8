"""Puts a function in the place of a module's ``training_step`` for the time of a fit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

__all__ = ["wrap_training_step"]


def wrap_training_step(module: pl.LightningModule, around: Callable[..., Any]) -> Callable[[], None]:
    """Let ``around(module, step, args, kwargs)`` run in place of ``module.training_step``; returns what undoes it.

    The step keeps its signature, which Lightning reads. A copy of the module runs the plain step. Undoing does nothing
    where someone else has set another step since.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> module = BoringModel()
    >>> undo = wrap_training_step(module, lambda module, step, args, kwargs: ("around", args))
    >>> module.training_step("batch", 0)
    ('around', ('batch', 0))
    >>> undo()
    >>> "training_step" in vars(module)
    False
    """
    before = vars(module).get("training_step")
    original = module.training_step
    plain = getattr(type(module), "training_step")  # noqa: B009  # unbound

    def step(of: pl.LightningModule, args: Any, kwargs: Any) -> Any:
        if of is not module:  # a copy, which has its own weights and nothing around its step
            return plain(of, *args, **kwargs)
        return around(module, original, args, kwargs)

    unbound = getattr(original, "__func__", original)  # whose signature begins with self, as that of ours does
    like_it = functools.wraps(unbound)(lambda of, *args, **kwargs: step(of, args, kwargs))
    ours = types.MethodType(like_it, module)
    vars(module)["training_step"] = ours

    def undo() -> None:
        if vars(module).get("training_step") is ours:
            del vars(module)["training_step"]
            if before is not None:
                vars(module)["training_step"] = before

    return undo
