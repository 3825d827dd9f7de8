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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_speedkit.optimize.batch_split import join_outputs
from lightning_speedkit.optimize.micro_batch_gradients import NewGradients, add_gradients
from lightning_speedkit.optimize.micro_batch_logs import RecordedLogs, joined_logs
from lightning_speedkit.optimize.micro_batch_retry import BatchPieces, run_until_it_fits, times
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_state import SavedState, StateKeeper

__all__ = ["StepsInPieces", "replaced"]

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let an object have another method of that name.

    >>> with replaced(box := nn.Identity(), "forward", lambda x: -x):
    ...     box(1)
    -1
    >>> box(1)
    1
    """
    own = vars(owner)  # written to directly: a module's __setattr__ looks for parameters first
    found = own.get(name, _MISSING)
    own[name] = method
    try:
        yield
    finally:
        if found is _MISSING:
            del own[name]
        else:
            own[name] = found


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
        self._pending: _Pending | None = None
        self._warned = False
        self._looked = False  # at a batch, for whether it can be computed in pieces

    def drop(self) -> None:
        """Forget a loss whose backward pass was never asked for."""
        self._pending = None

    def training_step(self, step: Callable[..., Any], size: MicroBatchSize, batch: Any, *arguments: Any) -> Any:
        """What ``step(batch, ...)`` returns, with a loss for :meth:`backward`."""
        self._pending = None
        if not self._looked:
            self._looked = True
            self._look_at(batch)
        before = self._keeper.save("training")

        def run(at_once: int | None) -> tuple[RecordedLogs, Any]:
            if at_once is not None:
                return self._forward_and_backward(step, batch, arguments, at_once)
            with self._recording() as logs:
                output = step(batch, *arguments)
            loss = _loss_of(output)
            if loss is None or not loss.requires_grad:  # no step, or Lightning's own message
                return logs, output
            proxy = loss.detach().requires_grad_()
            self._pending = _Pending(proxy, batch, arguments, before, [loss])
            return logs, _with_loss(output, proxy)

        return self._finish(run, size, batch, lambda: self._keeper.restore(before), "The forward pass", False)

    def evaluation_step(self, step: Callable[..., Any], size: MicroBatchSize, batch: Any, *arguments: Any) -> Any:
        """What ``step(batch, ...)`` returns."""
        before = self._keeper.save("evaluation")

        def run(at_once: int | None) -> tuple[RecordedLogs, Any]:
            if at_once is None:
                with self._recording() as logs:
                    return logs, step(batch, *arguments)
            pieces, samples, shares = self._pieces.cut(batch, at_once)
            outputs, recorded = [], []
            for piece in pieces:
                with self._recording() as logs:
                    outputs.append(step(piece, *arguments))
                recorded.append(logs)
            return joined_logs(recorded, samples, self._weights(shares)), self._joined(outputs, samples, shares)

        return self._finish(run, size, batch, lambda: self._keeper.restore(before), "An evaluation step")

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
                with self._plugin.train_step_context(), self._recording():  # what they log was logged
                    output = self._module.training_step(piece, *pending.arguments)
                part = _loss_of(output)
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
                with self._recording() as logs:
                    output = step(piece, *arguments)
                recorded.append(logs)
                part = _loss_of(output)
                if part is not None:
                    with self._without_autocast():
                        scaled = times(part, share) if scale is None else times(part, share) * scale
                        self._backward(scaled, self._module, self._trainer.optimizers[0])
                        del scaled
                    loss = times(part.detach(), share) + (0 if loss is None else loss)
                outputs.append(output if part is None else _with_loss(output, part.detach()))
                del output, part
        except BaseException:
            new.discard()
            raise
        gradients = new.detach()
        if loss is None:
            return joined_logs(recorded, samples, self._weights(shares)), None
        self._pending = _Pending(loss.requires_grad_(), new=gradients, scale=scale)
        joined = loss if isinstance(outputs[0], Tensor) else self._joined(outputs, samples, shares)
        return joined_logs(recorded, samples, self._weights(shares)), _with_loss(joined, loss)

    def _weights(self, shares: list[Any]) -> list[Any] | None:
        """What pieces weigh in the means that a step logs and returns; a mean over labels has to be one over labels."""
        return None if self._pieces.weigh is None else shares

    def _joined(self, outputs: list[Any], samples: list[int], shares: list[Any]) -> Any:
        try:
            return join_outputs(outputs, samples, self._weights(shares))
        except ValueError as error:
            if not self._warned:
                rank_zero_warn(f"{error} What the step returned for the last piece of a batch stands for all of it.")
            self._warned = True
            return outputs[-1]

    def _look_at(self, batch: Any) -> None:
        """Say at the first batch, and not when memory runs out, that there will be no pieces or no weights."""
        try:
            pieces = self._pieces.split(batch, max(self._pieces.count(batch) // 2, 1))
            for piece in pieces:
                self._pieces.count(piece)
        except (ValueError, TypeError) as why:
            rank_zero_warn(
                f"AutoMicroBatch cannot compute this batch in pieces, so it cannot help when memory runs out. {why} "
                "Override count_samples(batch) and split(batch, size) in a subclass, or remove the callback."
            )
            return
        if self._pieces.weigh is not None:
            self._pieces.weigh(pieces[0])  # raises where there is nothing to count

    def _finish(
        self,
        run: Callable[[int | None], tuple[RecordedLogs, Any]],
        size: MicroBatchSize,
        batch: Any,
        undo: Callable[[], None],
        doing: str,
        whole_is_proof: bool = True,
    ) -> Any:
        logs, output = run_until_it_fits(
            run,
            lambda: self._pieces.count(batch),
            size,
            undo=undo,
            device=self._device,
            doing=doing,
            whole_is_proof=whole_is_proof,
        )
        logs.replay(self._module.log)
        return output

    @contextmanager
    def _recording(self) -> Iterator[RecordedLogs]:
        logs = RecordedLogs()
        with replaced(self._module, "log", lambda *arguments, **options: logs.record(arguments, options)):
            yield logs

    def _scale(self) -> Tensor | None:
        """What a gradient scaler scales by now; without it, gradients of float16 vanish."""
        scaler = getattr(self._plugin, "scaler", None)
        return None if scaler is None else scaler.scale(torch.ones((), device=self._device))

    def _without_autocast(self) -> Any:
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _with_loss(output: Any, loss: Tensor) -> Any:
    """The output with that loss, and everything else without a graph, which would hold the memory of the batch."""
    if not isinstance(output, Mapping):
        return loss
    return {**apply_to_collection(dict(output), Tensor, Tensor.detach, allow_frozen=True), "loss": loss}
