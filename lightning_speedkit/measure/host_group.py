"""What ranks have to agree on, said over the host, so that no device waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostGroup"]


class HostGroup:
    """A process group of its own on the host, over gloo, whatever the devices use.

    It is made and closed on all ranks at the same point. Since it is its own, what is said here cannot be mixed up
    with the collectives of the training; and a rank that is gone is noticed at once, where NCCL would wait.

    Args:
        during: When it is used, for the error that tells of a rank that is gone, such as ``"during a training step"``.
    """

    def __init__(self, during: str) -> None:
        self._during = during
        self._group: Any = torch.distributed.new_group(backend="gloo")  # its type differs between torch versions

    def largest(self, row: Sequence[float]) -> list[float]:
        """The largest number over ranks, at each position, in float64; waits for all ranks.

        Raises:
            RuntimeError: Another rank is gone.
        """
        numbers = torch.tensor(row, dtype=torch.float64, device="cpu")
        try:
            torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"Another rank ended {self._during}; its own message says why. It may have run out of memory for good. "
                f"Here: {error}"
            ) from error
        return [float(number) for number in numbers]

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
