"""How many samples are computed at once, as learnt from what fitted into memory and what did not.

It halves after a failure, keeps what fits, and tries twice as much after a number of batches. A try that fails waits
twice as long for the next one, so that few batches are lost to trying. Pure arithmetic, for any training loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MicroBatchSize"]

_UNLIMITED = 2**62
_LONGEST = 64  # times grow_after


@dataclass(slots=True)
class MicroBatchSize:
    """The most samples that are computed at once.

    Args:
        smallest: Never fewer than this; 1 or more.
        grow_after: Try twice as many after so many batches in pieces; ``None`` never tries.

    Attributes:
        limit: The most samples at once, or ``None`` while no batch has failed.

    Raises:
        ValueError: An argument is too small.

    >>> size = MicroBatchSize(grow_after=2)
    >>> size.at_most(8), size.shrink(8), size.at_most(8)
    (8, True, 4)
    >>> for _ in range(2):
    ...     size.note_success(8)
    ...     size.grow()
    >>> size.at_most(8)  # a try
    8
    >>> size.shrink(8), size.limit, size.wait  # failed: back, and wait twice as long
    (True, 4, 4)
    """

    smallest: int = 1
    grow_after: int | None = 200
    limit: int | None = field(default=None, init=False)
    wait: int = field(init=False)
    done: int = field(default=0, init=False)  # batches in pieces since the limit changed
    _proven: int | None = field(default=None, init=False)  # the limit before a try that has met no large batch yet

    def __post_init__(self) -> None:
        for name, value in (("smallest", self.smallest), ("grow_after", self.grow_after)):
            if isinstance(value, bool) or not isinstance(value, int | None) or (name == "smallest" and value is None):
                raise TypeError(f"{name}={value!r} must be a whole number of 1 or more; got {type(value).__name__}.")
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be 1 or more{'' if name == 'smallest' else ', or None'}.")
        self.wait = self.grow_after or 1

    def at_most(self, samples: int) -> int:
        """How many samples of a batch of this many to compute at once."""
        return samples if self.limit is None else min(self.limit, samples)

    def shrink(self, tried: int) -> bool:
        """After so many samples at once did not fit: compute fewer; ``False`` if there are no fewer."""
        if tried <= self.smallest:
            return False
        if self._proven is not None and self._proven < tried:
            self.limit = self._proven
            self.wait = min(2 * self.wait, _LONGEST * (self.grow_after or 1))
        else:
            self.limit = max(tried // 2, self.smallest)
        self._proven, self.done = None, 0
        return True

    def note_success(self, samples: int) -> None:
        """A batch of this many samples was computed within the limit."""
        if self._proven is not None and samples > self._proven:
            self._proven = None
        self.done += self.limit is not None and samples > self.limit

    def grow(self) -> None:
        """Raise the limit if enough batches were computed in pieces since it changed."""
        if self.limit is not None and self.grow_after is not None and self.done >= self.wait:
            self._proven, self.limit, self.done = self.limit, 2 * self.limit, 0

    def row(self) -> list[int]:
        """Numbers whose largest over ranks :meth:`adopt` takes."""
        return [-(_UNLIMITED if self.limit is None else self.limit), self.wait, self.done]

    def adopt(self, largest: list[int]) -> None:
        """Take the smallest limit of all ranks, and their longest wait.

        >>> one, other = MicroBatchSize(), MicroBatchSize()
        >>> one.shrink(8)
        True
        >>> other.adopt([max(pair) for pair in zip(one.row(), other.row())])
        >>> other.limit
        4
        """
        limit = None if largest[0] == -_UNLIMITED else -largest[0]
        if limit != self.limit:
            self._proven = None
        self.limit, self.wait, self.done = limit, largest[1], largest[2]

    def state_dict(self) -> dict[str, int | None]:
        """What a checkpoint keeps."""
        return {"limit": self.limit, "wait": self.wait}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from a checkpoint."""
        self.limit, self.wait = state["limit"], state["wait"] or 1
        self.done, self._proven = 0, None
