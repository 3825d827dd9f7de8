"""For callbacks that cost little per batch: which hooks Lightning calls, what it goes on handling, where it is.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_hooks.py`` checks it against a real run, so that a Lightning
that does otherwise fails there and not in a user's training.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

__all__ = ["BATCH_HOOKS", "batch_in_progress", "call_hooks", "leave_logged", "pass_over_hooks"]

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def pass_over_hooks(trainer: pl.Trainer, callback: Callback, of: type[Callback], *names: str) -> None:
    """Let Lightning pass over hooks of a callback that do nothing in this run, until :func:`call_hooks`.

    Lightning calls the hooks of a callback within a context of its profiler, those that the callback does not define
    too, which costs some microseconds per batch. It calls what is callable; here they are ``None`` on the callback.

    Args:
        trainer: Whose ``callbacks`` have to hold the callback itself; if another one calls it, all stays as it is.
        callback: An object of the class ``of``, or of a subclass. Hooks that a subclass overrides are left alone.
        of: The class that knows which of its hooks are not needed.
        names: Of the hooks.

    >>> callback, trainer = Callback(), pl.Trainer(callbacks=[], barebones=True, accelerator="cpu")
    >>> trainer.callbacks.append(callback)
    >>> pass_over_hooks(trainer, callback, Callback, "on_after_backward")
    >>> callback.on_after_backward is None
    True
    >>> call_hooks(callback, "on_after_backward")
    >>> callback.on_after_backward is None
    False
    """
    if not any(other is callback for other in trainer.callbacks):  # type: ignore[attr-defined]
        return
    for name in names:
        if name not in vars(callback) and getattr(type(callback), name) is getattr(of, name):
            setattr(callback, name, None)


def call_hooks(callback: Callback, *names: str) -> None:
    """Let Lightning call hooks again that it was told to pass over."""
    for name in names:
        if name in vars(callback) and vars(callback)[name] is None:
            delattr(callback, name)


def batch_in_progress(trainer: pl.Trainer) -> tuple[Any, int]:
    """The batch that ``training_step`` got, on its device, and its number in the epoch.

    Right from ``on_train_batch_start`` to ``on_train_batch_end``. Reads ``trainer._results.batch``.
    """
    results = trainer._results
    return None if results is None else results.batch, trainer.fit_loop.epoch_loop.batch_idx


def leave_logged(trainer: pl.Trainer, *names: str) -> None:
    """Let Lightning no longer handle what was logged under these names in an earlier batch.

    It handles a value again in each batch after it was logged, though loggers and ``callback_metrics`` have it. They
    keep it. A value that is gathered over the epoch is left alone. Sets ``has_reset`` of the entries in
    ``trainer._results``, as Lightning does at the end of an epoch; to log it again clears that.
    """
    for entry in (trainer._results or {}).values():
        if entry.meta.name in names and not entry.meta.on_epoch:
            entry.has_reset = True
