"""What ranks have to agree on, said over the host, so that no device waits for it."""

from __future__ import annotations

import torch

__all__ = ["HostGroup"]


class HostGroup:
    """A process group of its own on the host, over gloo, whatever the devices use.

    It is made and closed on all ranks at the same point. Since it is its own, what is said here cannot be mixed up
    with the collectives of the training; and a rank that is gone is noticed at once, where NCCL would wait.
    """

    def __init__(self) -> None:
        self._group = torch.distributed.new_group(backend="gloo")

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

    def close(self) -> None:
        """Leave the group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
