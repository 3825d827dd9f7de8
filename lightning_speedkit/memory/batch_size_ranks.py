"""What ranks have to agree on while batch sizes are tried: whether a size fits, and what was measured."""

from __future__ import annotations

from lightning_speedkit.measure.host_group import HostGroup

__all__ = ["FAILED", "FITS", "NO_ROOM", "Ranks"]

FITS, NO_ROOM, FAILED = 0.0, 1.0, 2.0


class Ranks:
    """Numbers exchanged over the host, so that no device waits; alone it does nothing.

    To be made and closed on all ranks at the same point.

    >>> Ranks(1).largest([1.0, 2.0])
    [1.0, 2.0]
    """

    def __init__(self, world_size: int) -> None:
        self._group = HostGroup("while batch sizes were tried") if world_size > 1 else None

    def largest(self, numbers: list[float]) -> list[float]:
        """The largest over ranks, at each position; waits for all ranks.

        Raises:
            RuntimeError: Another rank is gone.
        """
        return numbers if self._group is None else self._group.largest(numbers)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None
