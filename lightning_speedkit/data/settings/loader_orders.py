"""Orders of indices as a DataLoader's sampler or batch sampler: without an end, or begun outside of the loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["BegunOrder", "EndlessOrder", "HandedOrder"]


class EndlessOrder:
    """Indices without an end: one permutation after the other, or through the dataset again and again."""

    def __init__(self, length: int, batch_size: int | None, shuffle: bool, seed: int) -> None:
        self._length = length
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.last: list[int] = []
        """The indices that were given out last."""

    def __iter__(self) -> Iterator[Any]:
        indices = self._indices()
        while True:
            self.last = [next(indices) for _ in range(self._batch_size or 1)]
            yield self.last[0] if self._batch_size is None else self.last

    def _indices(self) -> Iterator[int]:
        random = np.random.default_rng(self._seed)
        start = int(random.integers(self._length))  # each trial reads other samples first: none finds all of them warm
        while True:
            if not self._shuffle:
                yield from range(start, self._length)
                start = 0
            elif self._length <= 1_000_000:
                yield from random.permutation(self._length).tolist()
            else:
                yield from random.integers(self._length, size=1024).tolist()


class BegunOrder:
    """One pass of the user's sampler, asked as far as the user's loader would have asked, or as far as is needed.

    The question after the last item is the user's loader's alone: ``RandomSampler`` draws again when it has come to
    its end, which a loader finds out early if it looks ahead, and never if nobody asks it for a batch too many.
    """

    def __init__(self, order: Iterator[Any], length: int | None, generators: Sequence[torch.Generator]) -> None:
        self._order = order
        self._length = length
        self._generators = generators
        self._states: deque[tuple[int, list[torch.Tensor]]] = deque()  # after how many questions
        self._asked = 0
        self._waiting: deque[Any] = deque()

    def ask(self, times: int) -> None:
        """Have asked that often in all, as the user's loader would have by now."""
        while self._states and self._states[0][0] < times:
            self._states.popleft()
        while self._asked < times:
            try:
                self._waiting.append(self._next())
            except StopIteration:
                self._length = 0  # it ended
                return

    def ask_to_the_end(self) -> None:
        """Have found out that there is no more."""
        if self._length is not None:
            self.ask(self._length + 1)

    def take_back(self) -> None:
        """The pass ends here: what was drawn by looking further ahead than the user's loader was never drawn."""
        if self._states:
            for generator, state in zip(self._generators, self._states[0][1], strict=True):
                generator.set_state(state)
        self._states.clear()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._waiting:
            return self._waiting.popleft()
        if self._length is not None and self._asked >= self._length:
            raise StopIteration
        return self._next()

    def _next(self) -> Any:
        self._asked += 1
        item = next(self._order)
        if self._generators:
            self._states.append((self._asked, [generator.get_state() for generator in self._generators]))
        return item


class HandedOrder:
    """An order that was begun outside, as what the inner loader iterates."""

    def __init__(self) -> None:
        self.order: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.order
