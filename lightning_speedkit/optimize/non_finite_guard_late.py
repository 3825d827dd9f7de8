"""A step that a fused kernel skips by itself, and a host that learns of it later.

What it does: :func:`let_kernel_skip` gives the flag to the kernel, :class:`LateFlag` reads it without waiting, and
:func:`settle_before_saves` sees to it that no checkpoint is saved before it was read. When it helps: on CUDA, where
to read a flag before the step would make the host wait. What it costs: the batch, and what is undone, are kept until
the flag was read. Source: the fused optimizers of ``torch.optim``, which take ``found_inf`` from ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

__all__ = ["LateFlag", "let_kernel_skip", "settle_before_saves"]


class LateFlag(NamedTuple):
    """Of a step that may have been skipped."""

    read: Callable[[], float]  # waits for the flag
    batch: tuple[Any, int]  # and its number
    kept: list[torch.Tensor] | None  # the running statistics before it; None if another guard has undone the step


def let_kernel_skip(optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> None:
    """Let the fused kernel of the step that comes next leave everything as it is if the flag is 1."""
    optimizer.found_inf, optimizer.grad_scale = flag, None  # type: ignore[attr-defined]

    def forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        handle.remove()

    handle = optimizer.register_step_post_hook(forget)


def settle_before_saves(trainer: pl.Trainer, settle: Callable[[], None]) -> Callable[[], None]:
    """Call ``settle`` before a checkpoint is saved, by whomever and at whatever moment. Returns what undoes it."""
    save, found = trainer.save_checkpoint, vars(trainer).get("save_checkpoint")

    def settle_and_save(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        settle()
        save(filepath, weights_only=weights_only, storage_options=storage_options)

    def undo() -> None:
        if vars(trainer).get("save_checkpoint") is settle_and_save:
            del trainer.save_checkpoint
            if found is not None:
                trainer.save_checkpoint = found  # type: ignore[method-assign]

    trainer.save_checkpoint = settle_and_save  # type: ignore[method-assign]
    return undo
