"""Which samples are in which batch: a pure function of (seed, epoch), for any rank and from any position.

One global order of all samples is made per epoch and cut into steps. A step takes the next ``world_size * batch_size``
positions; rank ``r`` gets every ``world_size``-th of them, beginning with its own. So without shuffling rank ``r``
reads ``r, r + world_size, ...``, the ranks are disjoint, and where a run stopped is one number: the position in the
global order. A run that goes on from there, with as many ranks as it likes, gets exactly the samples that are left.

The order is ``"none"``, ``"full"`` (one permutation, that of torch's ``DistributedSampler``) or ``"blocks"``: the
blocks of a store are permuted, and samples are shuffled within a window of consecutive blocks of that permutation. The
third reads a store that does not fit into memory block after block, and needs memory for two windows instead of one
permutation of all samples.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["REMAINDERS", "SHUFFLES", "EpochOrder", "Integers"]

Integers = NDArray[np.int64]
SHUFFLES = ("none", "full", "blocks")
REMAINDERS = ("pad", "drop", "exact")


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The batches of one rank.

    ``remainder`` says what happens at the end of an epoch if the samples do not divide by the ranks. ``"pad"`` repeats
    a few from the beginning of the order and ``"drop"`` leaves a few out; either way all ranks take the same number of
    steps with the same number of samples. ``"exact"`` gives every sample exactly once: the ranks take the same number
    of steps, of which the last two may differ by one sample; only with ``batch_size=1``, or with fewer samples than
    ranks, is there nothing left for some ranks in the last step, and these take one step less. ``drop_last`` leaves out
    a last step that is not full.

    ``block_firsts`` (the first sample of each block) and ``window_blocks`` are for ``shuffle="blocks"``.

    >>> order = EpochOrder(samples=10, batch_size=2, world_size=2, rank=1)
    >>> [order.batch(0, step).tolist() for step in range(order.steps())]
    [[1, 3], [5, 7], [9]]
    >>> [order.batch(0, step, start=6).tolist() for step in range(order.steps(start=6))]
    [[7, 9]]
    """

    samples: int
    batch_size: int
    shuffle: str = "none"
    seed: int = 0
    drop_last: bool = False
    remainder: str = "pad"
    rank: int = 0
    world_size: int = 1
    block_firsts: Integers | None = None
    window_blocks: int = 1
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def step_size(self) -> int:
        """The positions of a full step, over all ranks."""
        return self.world_size * self.batch_size

    def steps(self, start: int = 0) -> int:
        """How many batches this rank has from a position of the global order on."""
        steps = self.global_steps(start)
        if self.remainder == "exact" and steps:
            first, last = self.span(steps - 1, start)
            return steps if self.rank < last - first else steps - 1
        return steps

    def global_steps(self, start: int = 0) -> int:
        """How many steps all ranks take together; some of them may have nothing in the last one."""
        full, rest = divmod(self._end(start) - start, self.step_size)
        return full if self.drop_last or not rest else full + 1

    def span(self, step: int, start: int = 0) -> tuple[int, int]:
        """The positions, over all ranks, of a step; with ``"pad"`` the last ones may lie behind the last sample."""
        end, size = self._end(start), self.step_size
        first, last = start + step * size, min(start + (step + 1) * size, end)
        rest = (end - start) % size
        if self.remainder == "exact" and 0 < rest < self.world_size and self.batch_size > 1 and not self.drop_last:
            # too few for all ranks: the step before gives up some of its own
            tail = end - self.world_size
            if step == self.global_steps(start) - 2:
                last = tail
            elif step == self.global_steps(start) - 1 and step > 0:
                first = tail
        return first, last

    def batch(self, epoch: int, step: int, start: int = 0) -> Integers:
        """The samples of this rank in a step: int64, shape ``(up to batch_size,)``."""
        first, last = self.span(step, start)
        return self.at(epoch, first, last)[self.rank :: self.world_size]

    def at(self, epoch: int, first: int, last: int) -> Integers:
        """The samples at the positions ``first`` to ``last - 1`` of the global order of an epoch."""
        if last <= self.samples:
            return self._slice(epoch, first, last)
        positions = np.arange(first, last, dtype=np.int64) % self.samples
        cut = self.samples - first if first < self.samples else 0
        head = self._slice(epoch, first, self.samples) if cut else positions[:0]
        repeated = self._slice(epoch, 0, int(positions[cut:].max()) + 1)[positions[cut:]]
        return np.concatenate([head, repeated])

    def blocks_of(self, epoch: int) -> Integers:
        """The blocks in the order in which ``"blocks"`` reads them."""
        return self._block_table(epoch)[0]

    def window_at(self, epoch: int, position: int) -> tuple[int, int]:
        """The entries of :meth:`blocks_of` that the window at that position begins with, and ends before."""
        _, starts = self._block_table(epoch)
        entry = int(np.searchsorted(starts, min(position, self.samples - 1), side="right")) - 1
        first = entry // self.window_blocks * self.window_blocks
        return first, min(first + self.window_blocks, len(starts) - 1)

    def block_digest(self) -> int:
        """A number that two orders by blocks share if their blocks and windows are the same; 0 for other orders."""
        if self.shuffle != "blocks":
            return 0
        return zlib.crc32(self._firsts().tobytes(), self.window_blocks)

    def _end(self, start: int) -> int:
        if self.remainder == "exact":
            return self.samples
        left = self.samples - start
        rounded = -(-left // self.world_size) if self.remainder == "pad" else left // self.world_size
        return start + rounded * self.world_size

    def _slice(self, epoch: int, first: int, last: int) -> Integers:
        if self.shuffle == "none":
            return np.arange(first, last, dtype=np.int64)
        if self.shuffle == "full":
            whole = self._remember("full", epoch, lambda: _permutation(self.samples, self.seed + epoch))
            return np.asarray(whole[first:last], dtype=np.int64)
        _, starts = self._block_table(epoch)
        parts, position = [], first
        while position < last:
            window = (int(np.searchsorted(starts, position, side="right")) - 1) // self.window_blocks
            begin = int(starts[window * self.window_blocks])
            samples = self._window(epoch, window)
            parts.append(samples[position - begin : last - begin])
            position = begin + len(samples)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _window(self, epoch: int, window: int) -> Integers:
        blocks, _ = self._block_table(epoch)
        firsts = self._firsts()

        def make() -> Integers:
            chosen = blocks[window * self.window_blocks : (window + 1) * self.window_blocks]
            samples = np.concatenate([np.arange(firsts[b], firsts[b + 1], dtype=np.int64) for b in chosen])
            return samples[_permutation(len(samples), _hashed(self.seed, epoch, window))]

        samples: Integers = self._remember(
            f"window{window % 2}", (epoch, window), make
        )  # a step may reach into the next
        return samples

    def _block_table(self, epoch: int) -> tuple[Integers, Integers]:
        """The permuted blocks, and the position at which each begins, with the end behind the last."""

        def make() -> tuple[Integers, Integers]:
            firsts = self._firsts()
            blocks = _permutation(len(firsts) - 1, self.seed + epoch).astype(np.int64)
            return blocks, np.concatenate([[0], np.cumsum((firsts[1:] - firsts[:-1])[blocks])])

        table: tuple[Integers, Integers] = self._remember("table", epoch, make)
        return table

    def _firsts(self) -> Integers:
        assert self.block_firsts is not None
        firsts: Integers = self._remember("firsts", 0, lambda: np.append(self.block_firsts, self.samples))
        return firsts

    def _remember(self, name: str, key: Any, make: Any) -> Any:
        """One value per name: that of the newest key."""
        found = self._cache.get(name)
        if found is None or found[0] != key:
            found = self._cache[name] = (key, make())
        return found[1]


def _permutation(count: int, seed: int) -> Integers:
    """torch's ``randperm``, whose numbers stay the same between versions."""
    dtype = torch.int32 if count < 2**31 else torch.int64
    values: Integers = torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=dtype).numpy()
    return values


def _hashed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
