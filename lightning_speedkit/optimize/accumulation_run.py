"""The accumulation windows of a run, one after the other: their places, their weights and their gradients.

What it does: it joins the arithmetic of a window, its bounds in the epoch, and the ranks that share it, for a loop that
tells it of each micro-batch. When it helps: in a callback, or a loop of your own on several ranks. What it costs: one
sum of a number over the ranks and one multiplication of the gradients per window; with a target on several ranks, a sum
that is waited for per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_speedkit.optimize.accumulation_bounds import WindowBounds
from lightning_speedkit.optimize.accumulation_checkpoint import restore_window, window_state
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_window import AccumulationWindow, scale_gradients

__all__ = ["AccumulationRun"]

Parameters = Callable[[], Iterable[Tensor]]


class AccumulationRun:
    """Where a run is in its windows.

    The order for each micro-batch: :meth:`begin` if :attr:`bounds` say that a window is over, :meth:`count`,
    :meth:`open` if there is no :attr:`window`, :meth:`weight` before its backward, and :meth:`add_loss`.

    Args:
        plan: How long windows are.
        ranks: The ranks that share them.
        alike: Every micro-batch counts 1, on every rank, so that nothing has to be asked.

    Example:

        >>> import torch
        >>> model, data = nn.Linear(1, 1, bias=False), torch.arange(1.0, 6.0).reshape(5, 1)
        >>> run = AccumulationRun(WindowPlan(target=4), DataRanks())
        >>> run.begin(start=0, position=0)
        >>> for batch, part in enumerate(data.split([1, 2, 2])):
        ...     run.count(len(part), batch, position=0)
        ...     if run.window is None:
        ...         window = run.open(position=0)
        ...     weight = run.weight(model.parameters, is_last=run.bounds.is_last(batch))
        ...     (model(part).mean() * weight).backward()
        >>> round(model.weight.grad.item(), 6)  # the mean of 1, 2, 3, 4, 5
        3.0
    """

    def __init__(self, plan: WindowPlan, ranks: DataRanks, alike: bool = False) -> None:
        self.plan = plan
        self.ranks = ranks
        self.alike = alike
        self.bounds = WindowBounds()
        self.window: AccumulationWindow | None = None  # from the clearing of the gradients to the last backward
        self.samples: int | Tensor = 1  # of the micro-batch in progress
        self.number = -1  # of the same, in its epoch
        self.had_backward = False  # the same
        self._reference: float | Tensor | None = None  # of all ranks; the first window has to use it
        self._collected = 0  # over all ranks in this window, towards a target
        self._newest = 0, 0  # the last micro-batch that was counted, and what it brought towards the target
        self._loss: Tensor | float = 0.0  # the sum over the samples of this window
        self._total: float | Tensor | None = None  # the samples of the window that was closed

    @property
    def collected(self) -> int:
        """What the window has towards its target, over all ranks."""
        return self._collected

    def begin(self, start: int, position: int) -> None:
        """A new window, from this micro-batch of the epoch on, at this epoch or step."""
        self.window, self._collected = None, 0
        self.bounds.begin(start, self.plan.factor(position))

    def count(self, samples: int | Tensor, batch: int, position: int) -> None:
        """The micro-batch in progress has so many samples."""
        self.samples, self.number, self.had_backward = samples, batch, False
        if self.bounds.factor is None:
            self._newest = batch, int(self.ranks.total(samples))
            self._collected += self._newest[1]
            if self.plan.is_reached(self._collected, position):
                self.bounds.end_at(batch)

    def open(self, position: int) -> AccumulationWindow:
        """The gradients are cleared: what comes now belongs to the window."""
        divisor = self.plan.divisor(position, self.samples, self.ranks.size)
        shared = self._reference if self.ranks.averages_at_once else None
        self.window = AccumulationWindow(divisor, 0.0 if shared is None else shared)
        self._loss = 0.0
        return self.window

    def weight(self, parameters: Parameters, is_last: bool, shrink: bool = False) -> float | Tensor:
        """What the backward of the micro-batch in progress is to be multiplied by.

        Args:
            parameters: Gives those whose gradients are scaled, before the last backward of the window.
            is_last: Whether this is the last micro-batch of the window.
            shrink: Keep weights below 1 by scaling the gradients so far down, as float16 needs it.
        """
        window = self.window
        assert window is not None
        self.had_backward = True
        if self.ranks.size > 1 and self._needs_reference():
            self._reference = window.reference = self._mean_over_ranks()
        elif shrink and not self.ranks.averages_at_once:
            _scale(parameters, window.raise_reference(self.samples))
        weight = window.add(self.samples)
        if is_last:
            weight = weight * self.close(parameters)
        return weight / window.divided_by

    def close(self, parameters: Parameters) -> float | Tensor:
        """Scale the gradients of the window; returns what the weight of a loss still to come is multiplied by."""
        window = self.window
        assert window is not None
        if self.ranks.size > 1 and self.bounds.factor is None:
            total: float | Tensor = self._collected
        elif self.alike:
            total = window.samples * self.ranks.size
        else:
            total = self.ranks.total(window.samples)
        scale = window.scale(total, self.ranks.size)
        _scale(parameters, scale)
        self._total = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
        self.window = None
        return scale

    def add_loss(self, loss: Tensor) -> None:
        """The mean loss of the micro-batch in progress; passed over if it has no samples, where it is no number."""
        if isinstance(self.samples, Tensor):
            self._loss = self._loss + (loss * self.samples).where(self.samples > 0, 0.0)
        elif self.samples:
            self._loss = self._loss + loss * self.samples

    def mean_loss(self) -> Tensor | float | None:
        """The mean over the samples of the window that was just closed, on all ranks; ``None`` inside a window."""
        if self._total is None:
            return None
        mean = self.ranks.total(self._loss) / self._total
        self._total = None
        return mean

    def state(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], done: int, with_loss: bool = False
    ) -> dict[str, Any]:
        """The open window with its gradients, as tensors and plain numbers; to be called on all ranks.

        Args:
            named_parameters: Those whose gradients are kept.
            done: The micro-batches of the epoch that are done; a later one will be counted again.
            with_loss: Keep the loss of the window too.
        """
        assert self.window is not None
        state = window_state(named_parameters, self.window, self.ranks)
        batch, brought = self._newest
        return {
            **state,
            "collected": self._collected - brought * (batch >= done),
            "loss": float(self.ranks.total(self._loss)) if with_loss else 0.0,
        }

    def restore(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], state: Mapping[str, Any], scale: float = 1.0
    ) -> None:
        """Go on with the window of :meth:`state`; its gradients are multiplied by ``scale``."""
        self.window = restore_window(named_parameters, state, self.ranks, scale)
        self._reference = self.window.reference
        self._collected = state["collected"]
        self._loss = state["loss"] if self.ranks.rank == 0 else 0.0

    def _needs_reference(self) -> bool:
        """Where each backward is averaged, several ranks need one reference for all windows; 0 is none."""
        return self._reference is None or (self.ranks.averages_at_once and float(self._reference) == 0)

    def _mean_over_ranks(self) -> float | Tensor:
        if self.alike:
            return 1.0
        mean = self.ranks.total(self.samples) / self.ranks.size
        return mean if isinstance(self.samples, Tensor) and not self.ranks.averages_at_once else float(mean)


def _scale(parameters: Parameters, scale: float | Tensor) -> None:
    if isinstance(scale, Tensor) or scale != 1.0:  # else it would look at each of them for nothing
        scale_gradients(parameters(), scale)
