"""Where the windows of an epoch begin and end, in micro-batches.

What it does: it keeps the place of a run in its windows while the factor changes, batches are missing, or the end of a
window is only known when it comes. When it helps: Lightning tells the first and the last micro-batch of a window by two
divisions of the batch's number in its epoch, which disagree once the factor changes inside an epoch (Lightning #21534).
What it costs: a comparison per question.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["WindowBounds"]


@dataclass(slots=True)
class WindowBounds:
    """The window that a micro-batch is in. Micro-batches are counted from 0 in each epoch.

    Args:
        start: The first micro-batch of the window.
        factor: How many micro-batches it has; ``None`` if it lasts until :meth:`end_at`.

    Example:

        >>> bounds = WindowBounds(start=0, factor=2)
        >>> [bounds.is_last(batch) for batch in range(2)]
        [False, True]
        >>> bounds.is_over_at(2)
        True
        >>> bounds.begin(2, factor=3)
        >>> [bounds.is_last(batch) for batch in range(2, 5)]
        [False, False, True]
    """

    start: int = 0
    factor: int | None = 1
    _end: int | None = field(default=None, init=False)

    def begin(self, start: int, factor: int | None) -> None:
        """A new window, from micro-batch ``start`` on."""
        self.start, self.factor, self._end = start, factor, None

    def end_at(self, batch: int) -> None:
        """The window of no factor ends with this micro-batch."""
        self._end = batch

    def is_last(self, batch: int) -> bool:
        """Whether a window ends with this micro-batch; the one before the start did end one.

        Windows of a factor follow one another although nothing was said of them: a loader may give ``None``.
        """
        if self.factor is not None:
            return (batch + 1 - self.start) % self.factor == 0
        return batch in (self._end, self.start - 1)

    def is_over_at(self, batch: int) -> bool:
        """Whether this micro-batch belongs to a later window."""
        if self.factor is not None:
            return batch >= self.start + self.factor
        return self._end is not None and batch > self._end

    def next_start(self, batch: int) -> int:
        """The first micro-batch of the later window that this one belongs to."""
        return batch if self.factor is None else batch - (batch - self.start) % self.factor
