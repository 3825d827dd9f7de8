"""What ranks have to agree on, said over the host, so that no device waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_step import RepeatableSteps

__all__ = ["HostGroup", "agree"]


class HostGroup:
    """A process group of its own on the host, over gloo, whatever the devices use.

    It is made and closed on all ranks at the same point. Since it is its own, what is said here cannot be mixed up
    with the collectives of the training; and a rank that is gone is noticed at once, where NCCL would wait.
    """

    def __init__(self) -> None:
        self._group: Any = torch.distributed.new_group(backend="gloo")  # its type differs between torch versions

    def largest(self, row: list[int]) -> list[int]:
        """The largest number over ranks, at each position; waits for all ranks.

        Raises:
            RuntimeError: Another rank is gone.
        """
        numbers = torch.tensor(row, dtype=torch.int64)
        try:
            torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                "Another rank ended during a training step; its own message says why. It may have run out of memory "
                f"for good. Here: {error}"
            ) from error
        return [int(number) for number in numbers]

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors what they are on rank 0, one after the other, through the memory of the host."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            found = tensor.detach().to("cpu", copy=True).contiguous()
            torch.distributed.broadcast(found.reshape(-1).view(torch.uint8), 0, group=self._group)
            with torch.no_grad():
                tensor.copy_(found)

    def close(self) -> None:
        """Leave the group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)


def agree(
    group: HostGroup, size: MicroBatchSize, steps: RepeatableSteps, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Take the smallest size of all ranks, and step parameter by parameter if one of them has to.

    Some optimizers round differently then. So the first time, what the last step gave is made the same on all ranks.
    Waits for all ranks.

    Raises:
        RuntimeError: Another rank is gone.
    """
    *largest, one_by_one = group.largest([*size.row(), steps.one_by_one])
    size.adopt(largest)
    steps.one_by_one = bool(one_by_one)
    if not steps.one_by_one or steps.agreed:
        return
    steps.agreed = True
    for optimizer in optimizers:
        group.take_from_first(parameter for g in optimizer.param_groups for parameter in g["params"])
        state = list(_state_of(optimizer))
        nbytes = sum(tensor.nbytes for tensor in state)
        most, least = group.largest([nbytes, -nbytes])
        if most == -least:  # not where each rank has a part of it
            group.take_from_first(state)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                yield from _parts_of(state[key])


def _parts_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value; a quantized state is one made of several."""
    if not isinstance(value, Tensor):
        return
    if not hasattr(value, "__tensor_flatten__"):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from _parts_of(getattr(value, name))
