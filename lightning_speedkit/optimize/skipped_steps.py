"""Leaves an optimizer step out so that nothing else counts it: no schedule, no counter.

What it does: :func:`drop_gradients` makes the step that follows change nothing, since optimizers pass over parameters
without a gradient. :class:`SkippedSteps` keeps learning rate schedules where they are and takes the step off
``trainer.global_step``; Lightning advances both though nothing was stepped with (Lightning #5558), so that a warm-up
runs ahead of the weights. When it helps: a step that a guard or a gradient scaler skips. What it costs: nothing on a
step that is taken.

Source: ``torch.optim`` (parameters whose ``grad`` is ``None`` keep weights, momentum and step count); Lightning #5558,
#16228, #18828, #21339.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_speedkit.measure.lightning_internals import uncount_step

__all__ = ["SkippedSteps", "drop_gradients", "has_gradients", "start_reading"]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer would change anything."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Make the next step of this optimizer change nothing: neither weights, nor momenta, nor its count of steps.

    With a ``GradScaler``, call its ``unscale_`` before: its ``update`` fails if it has seen no gradient.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    >>> weight.grad = torch.tensor([float("nan")])
    >>> drop_gradients(optimizer)
    >>> optimizer.step()
    >>> weight.item(), len(optimizer.state)
    (1.0, 0)
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def start_reading(value: Tensor) -> Callable[[], float]:
    """Start to bring one number to the host; the function that is returned waits for it and returns it.

    It waits for what the device had to do before this call and not for what it was given since. On a CPU, and on
    devices other than CUDA, the number is read when it is asked for.

    >>> start_reading(torch.tensor(1.5))()
    1.5
    """
    value = value.detach()
    if value.device.type != "cuda":
        return value.clone().item
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def read() -> float:
        event.synchronize()
        return host.item()

    return read


class SkippedSteps:
    """What is owed to the schedules and the step counter of one Trainer; shared by all guards of that Trainer.

    Schedules with ``interval="step"`` are held; those that watch a metric are left to it.

    :meth:`hold` is called during a step that is, or may be, without effect; :meth:`release` if it had one after all;
    :meth:`settle` when the batch has ended. :meth:`owe` is called for a step that turned out to be without effect after
    it had been counted; :meth:`pay` during each later step that is taken. In between, from :meth:`doubt` to
    :meth:`know`, the step count and what a forward pass changes may be taken back; who needs them waits by
    :meth:`once_known`.
    """

    _of: weakref.WeakKeyDictionary[pl.Trainer, SkippedSteps] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.owed = 0  # how many steps the schedules are ahead
        self.is_held = False  # whether the step in progress is not to be counted
        self._held: list[LRSchedulerConfig] = []
        self._pays = False  # the step in progress
        self._is_in_doubt = False  # whether the last step may turn out to be without effect
        self._waiting: dict[object, Callable[[], None]] = {}

    @classmethod
    def of(cls, trainer: pl.Trainer) -> SkippedSteps:
        """The one of this Trainer."""
        found = cls._of.get(trainer)
        if found is None:
            found = cls._of[trainer] = cls()
        return found

    def hold(self, trainer: pl.Trainer) -> None:
        """Do not count the step in progress."""
        if self._pays:  # with a step that is not taken, nothing is paid
            self._pays = False
            self.owed += 1
        self.is_held = True
        self._hold_schedules(trainer)

    def release(self) -> None:
        """Count the step in progress after all."""
        self.is_held = self._pays = False
        for config in self._held:
            config.interval = "step"
        self._held = []

    def owe(self, trainer: pl.Trainer) -> None:
        """Take a step that was counted off the counter now, and off the schedules when the next one is taken."""
        uncount_step(trainer)
        self.owed += 1

    def pay(self, trainer: pl.Trainer) -> None:
        """If schedules are ahead, hold them during the step in progress, which is taken."""
        if self.owed and not self.is_held and not self._pays:
            self.owed -= 1
            self._pays = True
            self._hold_schedules(trainer)

    def settle(self, trainer: pl.Trainer) -> bool:
        """At the end of a batch: take a held step off the counter, and go on; whether there was one."""
        was_held = self.is_held
        if was_held:
            uncount_step(trainer)
        self.release()
        return was_held

    def doubt(self) -> None:
        """The step in progress will be counted, and it is not known yet whether it has an effect."""
        self._is_in_doubt = True

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits to know."""
        return bool(self._waiting)

    def know(self) -> None:
        """It is known, and made up for: do what waits for it."""
        waiting, self._waiting, self._is_in_doubt = self._waiting, {}, False
        for act in waiting.values():
            act()

    def once_known(self, who: object, act: Callable[[], None]) -> None:
        """Call ``act`` now, or once the last step is known to be one or none; the newest one of each ``who``."""
        if self._is_in_doubt:
            self._waiting[who] = act
        else:
            act()

    def forget(self) -> None:
        """At the end of a fit: nothing is held, owed or waited for."""
        self.release()
        self.owed, self._is_in_doubt, self._waiting = 0, False, {}

    def _hold_schedules(self, trainer: pl.Trainer) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.interval = "held"  # Lightning steps a schedule if this is the interval that has just ended
                self._held.append(config)
