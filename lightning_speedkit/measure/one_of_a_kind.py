"""Callbacks of which a Trainer takes one, and the words in which a second one is refused.

When it helps: Lightning refuses two callbacks that save under one key as soon as the Trainer is made, and speaks of
``state_key``, which the user has never seen. Here each has a key of its own until its first run, so that the callback
itself says at ``fit`` what is wrong. What it costs: nothing.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

__all__ = ["OneOfAKind"]


class OneOfAKind(Callback):
    """A callback that refuses a second one of its kind in ``setup``, which has to call that of this class.

    States are saved and restored inside runs only, under the name of the class.

    >>> first, second = OneOfAKind(), OneOfAKind()
    >>> first.state_key == second.state_key
    False
    """

    _has_run = False

    @property
    @override
    def state_key(self) -> str:
        key = super().state_key
        return key if self._has_run else f"{key} {id(self)}"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._has_run = True
