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

    The step keeps its signature, which Lightning reads. A copy of the module runs the plain step. Several may be put
    around one step, and undone in any order; where someone else has set another step since, that one stays.

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

    undone: list[bool] = []

    def step(of: pl.LightningModule, args: Any, kwargs: Any) -> Any:
        if of is not module:  # a copy, which has its own weights and nothing around its step
            return plain(of, *args, **kwargs)
        if undone:  # below another one that is still there
            return original(*args, **kwargs)
        return around(module, original, args, kwargs)

    unbound = getattr(original, "__func__", original)  # whose signature begins with self, as that of ours does
    like_it: Any = functools.wraps(unbound)(lambda of, *args, **kwargs: step(of, args, kwargs))
    like_it._undone, like_it._before = undone, before
    ours = types.MethodType(like_it, module)
    vars(module)["training_step"] = ours

    def undo() -> None:
        undone.append(True)
        if vars(module).get("training_step") is ours:
            del vars(module)["training_step"]
            left = before
            while getattr(left, "_undone", None):  # one below that was undone first
                left = getattr(left, "_before", None)
            if left is not None:
                vars(module)["training_step"] = left

    return undo
