"""The steps of a LightningModule, whole or in pieces, so that nobody outside sees the difference.

Lightning computes a loss, clears the gradients, calls hooks that may scale the loss, and runs the backward pass. A
batch that is computed in pieces needs all backward passes before the loss is known. So the loss that Lightning gets is
a number without the model's graph. Its backward pass says how the gradient is scaled (by accumulation, a gradient
scaler, another callback), and the gradient is added at that moment, scaled so.

- In pieces, forward and backward passes run when Lightning asks for the loss, into gradients kept apart.
- Whole, the graph stays here until the backward pass. If that fails the graph is dropped, its memory is free, and the
  batch runs in pieces. Its loss, logged values, buffers, metrics and random numbers stay those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_speedkit.optimize.micro_batch_gradients import NewGradients, add_gradients
from lightning_speedkit.optimize.micro_batch_logs import RecordedLogs
from lightning_speedkit.optimize.micro_batch_retry import BatchPieces, run_until_it_fits, times
from lightning_speedkit.optimize.micro_batch_run import StepRuns, loss_of, with_loss
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_state import SavedState, StateKeeper

__all__ = ["StepsInPieces"]


@dataclass(slots=True)
class _Pending:
    """A batch between its loss and its backward pass."""

    proxy: Tensor  # the loss that Lightning has
    batch: Any = None
    arguments: tuple[Any, ...] = ()
    before: SavedState | None = None
    graph: list[Tensor] = field(default_factory=list)  # the loss with its graph, popped when the backward starts
    new: list[tuple[nn.Parameter, Tensor]] | None = None  # gradients of pieces
    scale: Tensor | None = None  # what those are scaled by


class StepsInPieces:
    """Stands in for the steps of a module and for the backward pass of a precision plugin, during one run.

    Args:
        trainer: The Trainer.
        module: Its module.
        pieces: How batches are cut.
        backward: The ``backward`` of its precision plugin.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        pieces: BatchPieces,
        backward: Callable[..., None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._pieces = pieces
        self._device = trainer.strategy.root_device
        self._plugin = trainer.precision_plugin
        self._backward = backward
        self._parameters = list(module.parameters())
        self._keeper = StateKeeper(module, self._device)
        self._runs = StepRuns(module, pieces, self._device)
        self._pending: _Pending | None = None

    def drop(self) -> None:
        """Forget a loss whose backward pass was never asked for."""
        self._pending = None

    def training_step(self, step: Callable[..., Any], size: MicroBatchSize, batch: Any, *arguments: Any) -> Any:
        """What ``step(batch, ...)`` returns, with a loss for :meth:`backward`."""
        self._pending = None
        self._runs.look_at(batch)
        before = self._keeper.save("training")
        undo = partial(self._keeper.restore, before)

        def run(at_once: int | None) -> tuple[RecordedLogs, Any]:
            if at_once is not None:
                return self._forward_and_backward(step, batch, arguments, at_once)
            with self._runs.recording() as logs:
                output = step(batch, *arguments)
            loss = loss_of(output)
            if loss is None or not loss.requires_grad:  # no step, or Lightning's own message
                return logs, output
            proxy = loss.detach().requires_grad_()
            self._pending = _Pending(proxy, batch, arguments, before, [loss])
            return logs, with_loss(output, proxy)

        return self._runs.until_it_fits(run, size, batch, undo, "The forward pass", whole_is_proof=False)

    def evaluation_step(self, step: Callable[..., Any], size: MicroBatchSize, batch: Any, *arguments: Any) -> Any:
        """What ``step(batch, ...)`` returns."""
        undo = partial(self._keeper.restore, self._keeper.save("evaluation"))

        def run(at_once: int | None) -> tuple[RecordedLogs, Any]:
            if at_once is None:
                with self._runs.recording() as logs:
                    return logs, step(batch, *arguments)
            pieces, samples, shares = self._pieces.cut(batch, at_once)
            outputs, recorded = [], []
            for piece in pieces:
                with self._runs.recording() as logs:
                    outputs.append(step(piece, *arguments))
                recorded.append(logs)
            logs = self._runs.joined_logs(recorded, samples, shares)
            return logs, self._runs.joined(outputs, samples, shares)

        return self._runs.until_it_fits(run, size, batch, undo, "An evaluation step")

    def backward(self, size: MicroBatchSize, loss: Tensor, *arguments: Any) -> None:
        """The backward pass of what Lightning made of the loss of the last :meth:`training_step`."""
        pending, self._pending = self._pending, None
        if pending is None:
            self._backward(loss, *arguments)
            return
        (weight,) = torch.autograd.grad(loss, pending.proxy)
        if pending.new is not None:
            add_gradients(pending.new, (weight if pending.scale is None else weight / pending.scale).reshape(()))
        else:
            self._backward_of_whole(pending, size, weight, arguments)

    def _backward_of_whole(
        self,
        pending: _Pending,
        size: MicroBatchSize,
        weight: Tensor,
        arguments: tuple[Any, ...],
    ) -> None:
        new = NewGradients(self._parameters)
        after: list[SavedState] = []

        def run(at_once: int | None) -> None:
            if at_once is None:
                self._backward(pending.graph.pop() * weight, *arguments)
                return
            pieces, _, shares = self._pieces.cut(pending.batch, at_once)
            for piece, share in zip(pieces, shares, strict=True):
                with self._plugin.train_step_context(), self._runs.recording():  # what they log was logged
                    output = self._module.training_step(piece, *pending.arguments)
                part = loss_of(output)
                if part is not None:
                    self._backward(times(part, share) * weight, *arguments)
                del output, part

        def undo() -> None:
            new.restart()
            if not after:
                after.append(self._keeper.save())
            assert pending.before is not None
            self._keeper.restore(pending.before)

        try:
            run_until_it_fits(
                run,
                lambda: self._pieces.count(pending.batch),
                size,
                undo=undo,
                device=self._device,
                doing="The backward pass",
            )
        except BaseException:
            new.discard()
            raise
        if after:
            self._keeper.restore(after[0])
        new.add()

    def _forward_and_backward(
        self,
        step: Callable[..., Any],
        batch: Any,
        arguments: tuple[Any, ...],
        at_once: int,
    ) -> tuple[RecordedLogs, Any]:
        pieces, samples, shares = self._pieces.cut(batch, at_once)
        scale, new = self._scale(), NewGradients(self._parameters)
        outputs, recorded, loss = [], [], None
        try:
            for piece, share in zip(pieces, shares, strict=True):
                with self._runs.recording() as logs:
                    output = step(piece, *arguments)
                recorded.append(logs)
                part = loss_of(output)
                if part is not None:
                    with self._without_autocast():
                        scaled = times(part, share) if scale is None else times(part, share) * scale
                        self._backward(scaled, self._module, self._trainer.optimizers[0])
                        del scaled
                    loss = times(part.detach(), share) + (0 if loss is None else loss)
                outputs.append(output if part is None else with_loss(output, part.detach()))
                del output, part
        except BaseException:
            new.discard()
            raise
        gradients = new.detach()
        logs = self._runs.joined_logs(recorded, samples, shares)
        if loss is None:
            return logs, None
        self._pending = _Pending(loss.requires_grad_(), new=gradients, scale=scale)
        joined = loss if isinstance(outputs[0], Tensor) else self._runs.joined(outputs, samples, shares)
        return logs, with_loss(joined, loss)

    def _scale(self) -> Tensor | None:
        """What a gradient scaler scales by now; without it, gradients of float16 vanish."""
        scaler = getattr(self._plugin, "scaler", None)
        return None if scaler is None else scaler.scale(torch.ones((), device=self._device))

    def _without_autocast(self) -> Any:
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
