"""Runs a step of a LightningModule until it fits, and makes what it logs and returns that of one whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_speedkit.optimize.batch_join import join_outputs
from lightning_speedkit.optimize.micro_batch_logs import RecordedLogs, joined_logs
from lightning_speedkit.optimize.micro_batch_retry import BatchPieces, run_until_it_fits
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize

__all__ = ["StepRuns", "loss_of", "replaced", "with_loss"]

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let an object have another method of that name.

    >>> with replaced(box := torch.nn.Identity(), "forward", lambda x: -x):
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


class StepRuns:
    """Runs steps of a module, in which nothing is logged before they have succeeded.

    Args:
        module: The module.
        pieces: How batches are cut.
        device: Where memory is to be freed.
    """

    def __init__(self, module: pl.LightningModule, pieces: BatchPieces, device: torch.device) -> None:
        self._module = module
        self._pieces = pieces
        self._device = device
        self._looked = self._warned = False

    def until_it_fits(
        self,
        run: Callable[[int | None], tuple[RecordedLogs, Any]],
        size: MicroBatchSize,
        batch: Any,
        undo: Callable[[], None],
        doing: str,
        whole_is_proof: bool = True,
    ) -> Any:
        """The output of ``run``, as :func:`run_until_it_fits` calls it; what it logged is logged."""
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
    def recording(self) -> Iterator[RecordedLogs]:
        """Hold back what the module logs."""
        logs = RecordedLogs()
        with replaced(self._module, "log", lambda *arguments, **options: logs.record(arguments, options)):
            yield logs

    def joined_logs(self, recorded: list[RecordedLogs], samples: list[int], shares: list[Any]) -> RecordedLogs:
        """What the whole batch would have logged, from what its pieces did."""
        return joined_logs(recorded, samples, self._weights(shares))

    def joined(self, outputs: list[Any], samples: list[int], shares: list[Any]) -> Any:
        """What the whole batch would have put out; where that cannot be told, what the last piece did."""
        try:
            return join_outputs(outputs, samples, self._weights(shares))
        except ValueError as error:
            if not self._warned:
                rank_zero_warn(f"{error} What the step returned for the last piece of a batch stands for all of it.")
            self._warned = True
            return outputs[-1]

    def look_at(self, batch: Any) -> None:
        """Say at the first batch, and not when memory runs out, that there will be no pieces or no weights."""
        if self._looked:
            return
        self._looked = True
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

    def _weights(self, shares: list[Any]) -> list[Any] | None:
        """What pieces weigh in the means that a step logs and returns; a mean over labels has to be one over labels."""
        return None if self._pieces.weigh is None else shares


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a training step returned.

    >>> loss_of({"loss": torch.zeros(()), "rows": 3}), loss_of(None)
    (tensor(0.), None)
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def with_loss(output: Any, loss: Tensor) -> Any:
    """The output with that loss, and everything else without a graph, which would hold the memory of the batch.

    >>> with_loss({"loss": torch.zeros(()), "rows": 3}, torch.ones(()))
    {'loss': tensor(1.), 'rows': 3}
    """
    if not isinstance(output, Mapping):
        return loss
    return {**apply_to_collection(dict(output), Tensor, Tensor.detach, allow_frozen=True), "loss": loss}
