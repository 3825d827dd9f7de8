"""A callback that changes the model or the process serves one run at a time, and is alone of its kind in a Trainer.

What it does: a callback says in ``setup`` for which Trainer it works. Where another Trainer's run with the same object
goes on, because a hook of that run has started this one, the second is refused, so that what the first has changed is
undone by the first. What it costs: nothing.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus

__all__ = ["begin_run", "is_in_another_run", "refuse_second"]

# beside the callbacks, not in them: copies and pickles of a callback work for no Trainer
_TRAINERS: WeakKeyDictionary[Callback, ReferenceType[pl.Trainer]] = WeakKeyDictionary()


def begin_run(callback: Callback, trainer: pl.Trainer) -> None:
    """Notes, in ``setup``, that the callback works for this Trainer from now on.

    Raises:
        MisconfigurationException: The run of another Trainer with the same object is going on.
    """
    if is_in_another_run(callback, trainer):
        name = type(callback).__name__
        raise MisconfigurationException(
            f"This {name} is in use by another Trainer, whose run is still going on. Give the Trainer inside it a "
            f"{name} of its own, or none."
        )
    _TRAINERS[callback] = ref(trainer)


def is_in_another_run(callback: Callback, trainer: pl.Trainer) -> bool:
    """Whether the callback works for another Trainer whose run is going on; ``teardown`` must then change nothing.

    >>> is_in_another_run(Callback(), pl.Trainer(accelerator="cpu", barebones=True))
    False
    """
    found = _TRAINERS.get(callback)
    other = None if found is None else found()
    return other is not None and other is not trainer and other.state.status == TrainerStatus.RUNNING


def refuse_second(trainer: pl.Trainer, kind: type[Callback], reason: str) -> None:
    """Refuses a Trainer that has several callbacks of this kind.

    Raises:
        MisconfigurationException: There are two or more; ``reason`` completes "Two Kind callbacks ...".
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if sum(isinstance(callback, kind) for callback in callbacks) > 1:
        raise MisconfigurationException(f"Two {kind.__name__} callbacks {reason}")
