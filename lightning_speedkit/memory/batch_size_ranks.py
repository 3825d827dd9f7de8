"""What ranks have to agree on while batch sizes are tried: whether a size fits, and what was measured."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FAILED", "FITS", "NO_ROOM", "Ranks"]

FITS, NO_ROOM, FAILED = 0.0, 1.0, 2.0


class Ranks:
    """Numbers exchanged over gloo, in a group of their own, so that no device waits; alone it does nothing.

    To be made and closed on all ranks at the same point.

    >>> Ranks(1).largest([1.0, 2.0])
    [1.0, 2.0]
    """

    def __init__(self, world_size: int) -> None:
        self._group: Any = torch.distributed.new_group(backend="gloo") if world_size > 1 else None

    def largest(self, numbers: list[float]) -> list[float]:
        """The largest over ranks, at each position; waits for all ranks.

        Raises:
            RuntimeError: Another rank is gone.
        """
        if self._group is None:
            return numbers
        found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        try:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"Another rank ended while batch sizes were tried; its own message says why. Here: {error}"
            ) from error
        return [float(number) for number in found]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = None
