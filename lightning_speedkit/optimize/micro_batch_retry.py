"""Runs something with fewer and fewer samples at once until it fits into memory; for any training loop.

What it costs: nothing while all fits, apart from the copies that a second try starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_speedkit.measure.out_of_memory import out_of_memory_source, release_memory
from lightning_speedkit.optimize.batch_split import samples_of, split_batch
from lightning_speedkit.optimize.micro_batch_gradients import NewGradients
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_state import StateKeeper

__all__ = ["BatchPieces", "backward_in_pieces", "run_until_it_fits", "times"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchPieces:
    """How batches are counted, cut and weighed.

    Args:
        count: The number of samples of a batch.
        split: The pieces of a batch, with at most so many samples each.
        weigh: What the loss of a piece weighs beside those of the others, a number or a tensor of no dimension;
            ``None``: losses are sums.
    """

    count: Callable[[Any], int]
    split: Callable[[Any, int], list[Any]]
    weigh: Callable[[Any], Any] | None

    def cut(self, batch: Any, at_most: int) -> tuple[list[Any], list[int], list[Any]]:
        """The pieces, their samples, and the shares of their losses in that of the batch, for :func:`times`."""
        pieces = self.split(batch, at_most)
        samples = [self.count(piece) for piece in pieces]
        if self.weigh is None:
            return pieces, samples, [1.0] * len(pieces)
        weights = [self.weigh(piece) for piece in pieces]
        total = sum(weights)
        if isinstance(total, Tensor):
            total = total.to(torch.float32 if total.device.type == "mps" else torch.float64).clamp(min=1)
        return pieces, samples, [weight / (total if isinstance(total, Tensor) else total or 1) for weight in weights]


def times(loss: Tensor, share: float | Tensor) -> Tensor:
    """The product, in the type of the loss; 0 for a share of 0, where the loss may be no number.

    >>> times(torch.ones(()), torch.tensor(0.25, dtype=torch.float64))
    tensor(0.2500)
    >>> times(torch.tensor(float("nan")), 0.0)  # a mean over no labels
    tensor(0.)
    """
    if isinstance(share, Tensor):
        return (loss * share.to(loss.dtype)).where(share > 0, 0.0)
    return loss * share if share else loss.where(torch.zeros_like(loss, dtype=torch.bool), 0.0)


def run_until_it_fits(
    run: Callable[[int | None], T],
    samples: Callable[[], int],
    size: MicroBatchSize,
    *,
    undo: Callable[[], None] = lambda: None,
    device: torch.device | str = "cpu",
    doing: str = "A step",
    whole_is_proof: bool = True,
) -> T:
    """Call ``run`` with the number of samples to compute at once, and again with fewer while memory runs out.

    Each try has fewer samples than the one before, so there are at most as many as the batch can be halved.

    Args:
        run: Computes the batch, so many samples at once; ``None`` stands for all of them. Called again, it has to do
            all of it again.
        samples: The number of samples of the batch; not asked before something has failed.
        size: What was learnt so far; it is brought up to date.
        undo: Called before each new try, after the failed one has let go of its tensors.
        device: Where memory is to be freed.
        doing: What is done, for messages.
        whole_is_proof: Whether a whole batch that was computed did fit; not if its backward pass is still to come.

    Returns:
        What ``run`` returned.

    Raises:
        torch.OutOfMemoryError: Not even the fewest samples fit, or the batch cannot be split.

    >>> def run(at_once):
    ...     print("try", at_once)
    ...     if at_once is None or at_once > 3:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return "done"
    >>> run_until_it_fits(run, lambda: 8, size := MicroBatchSize())
    try None
    try 4
    try 2
    'done'
    >>> size.limit
    2
    """
    device = torch.device(device)
    while True:
        count = None if size.limit is None else _count(samples)
        tried = size.limit if count is not None and size.at_most(count) < count else None
        try:
            result = run(tried)
        except (RuntimeError, MemoryError, OSError) as error:
            if out_of_memory_source(error) in (None, "NCCL"):  # a broken communicator stays broken
                raise
            _shrink(tried, samples, size, doing, error)
        else:
            if count is not None and (tried is not None or whole_is_proof):
                size.note_success(count)
            return result
        undo()  # here the traceback of the error is gone, and with it the tensors of its frames
        release_memory(device)


def backward_in_pieces(
    loss_of: Callable[[Any], Tensor], batch: Any, module: nn.Module, size: MicroBatchSize, batch_dim: int = 0
) -> Tensor:
    """``loss_of(batch).backward()`` in as few pieces as memory allows; for a plain loop.

    The gradients, added to those that are there, are those of the whole batch. The loss of a piece has to be the mean
    over its samples.

    Args:
        loss_of: Computes the loss of a batch, or of a piece of it.
        batch: The batch; see :func:`split_batch` for what can be cut.
        module: Whose parameters, buffers and metrics take part.
        size: What was learnt so far; keep it from batch to batch.
        batch_dim: The batch dimension of the tensors.

    Returns:
        The loss of the batch, without a graph.

    Raises:
        torch.OutOfMemoryError: A piece of the smallest size does not fit, or the batch cannot be cut.

    >>> model, x = nn.Linear(1, 1, bias=False), torch.arange(1.0, 5.0).reshape(4, 1)
    >>> def loss_of(rows):
    ...     if len(rows) > 2:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return model(rows).mean()
    >>> loss = backward_in_pieces(loss_of, x, model, size := MicroBatchSize())
    >>> model.weight.grad.item(), size.limit
    (2.5, 2)
    """
    parameters = list(module.parameters())
    device = parameters[0].device
    keeper, new = StateKeeper(module, device), NewGradients(parameters)
    before = keeper.save()
    pieces = BatchPieces(partial(samples_of, dim=batch_dim), partial(split_batch, dim=batch_dim), samples_of)

    def run(at_once: int | None) -> Tensor:
        if at_once is None:
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        total = torch.zeros((), device=device)
        for piece, _, share in zip(*pieces.cut(batch, at_once), strict=True):
            loss = times(loss_of(piece), share)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def undo() -> None:
        new.restart()
        keeper.restore(before)

    try:
        loss = run_until_it_fits(run, lambda: pieces.count(batch), size, undo=undo, device=device)
    except BaseException:
        new.discard()
        raise
    new.add()
    size.grow()
    return loss


def _count(samples: Callable[[], int]) -> int | None:
    try:
        return samples()
    except (ValueError, TypeError):  # it is tried whole, and said if that fails
        return None


def _shrink(
    tried: int | None, samples: Callable[[], int], size: MicroBatchSize, doing: str, error: BaseException
) -> None:
    if tried is None:
        try:
            tried = samples()
        except (ValueError, TypeError) as why:
            raise torch.OutOfMemoryError(
                f"{doing} ran out of memory, and the batch cannot be computed in pieces. {why} The error was: {error}"
            ) from error
    if not size.shrink(tried):
        raise torch.OutOfMemoryError(
            f"{doing} ran out of memory with {tried} sample{'s' * (tried != 1)} at once, and smallest={size.smallest} "
            f"allows no fewer. Use a smaller model or shorter samples, a lower precision, or activation "
            f"checkpointing. The error was: {error}"
        ) from error
