"""Random numbers of one training batch: a pure function of a seed, the epoch, the batch and the rank.

What it does: whatever is drawn for a batch depends on integers that a resumed run has again, and on nothing else. The
global random state is neither read nor changed, also around code that knows no other.
When it helps: augmentation that a resumed run repeats, number for number.
What it costs: a little time on the host for each operation that draws, and more for containing code that draws from the
global state, which is saved and put back.

Source: NumPy's ``SeedSequence`` (O'Neill, Developing a seed_seq alternative, 2015).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning.pytorch as pl
import numpy as np
import torch

__all__ = ["batch_generator", "contained_random", "training_seed"]


def training_seed(trainer: pl.Trainer, seed: int) -> tuple[int, int, int, int]:
    """The seed of the training batch that is being moved to the device: ``(seed, epoch, batch, rank)``.

    For the hooks ``on_before_batch_transfer``, ``transfer_batch_to_device`` and ``on_after_batch_transfer``, where
    Lightning has not counted the batch yet: from ``on_train_batch_start`` on, this is the seed of the next batch.

    A run that is resumed from a checkpoint, also from one in the middle of an epoch, gets the numbers of the unbroken
    run. They count batches and not optimizer steps, so gradient accumulation does not change them. The rank is that of
    the data: ranks that share a batch, as under tensor parallelism, get the same numbers.

    Args:
        trainer: The Trainer that fits.
        seed: A seed of your own, for example that of the DataModule.
    """
    shards = trainer.distributed_sampler_kwargs or {}
    rank = shards.get("rank", trainer.global_rank)
    return int(seed), int(trainer.current_epoch), int(trainer.fit_loop.batch_idx + 1), int(rank)


def batch_generator(seed: Sequence[int], device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on a device, seeded from several integers; no two different sequences give the same seed by design.

    Args:
        seed: Integers from 0 to 2**64 - 1.
        device: Where the numbers are drawn. Devices of different kinds draw different numbers from one seed.

    Raises:
        TypeError: What should be an integer is none.
        ValueError: An integer is negative or too large.

    >>> draw = lambda *seed: torch.randint(100, (3,), generator=batch_generator(seed)).tolist()
    >>> draw(1, 0) == draw(1, 0), draw(1, 0) == draw(0, 1), draw(1) == draw(1, 0)
    (True, False, False)
    """
    return torch.Generator(device).manual_seed(_mixed(seed))


@contextmanager
def contained_random(seed: Sequence[int], device: torch.device | str = "cpu") -> Iterator[None]:
    """Run code that draws from the global random state: it gets numbers that depend on the seed, and leaves no trace.

    Covers ``random``, ``numpy.random``, and torch on the CPU and on a CUDA device. Another thread that draws from the
    global state at the same time is disturbed.

    Args:
        seed: Integers from 0 to 2**64 - 1.
        device: The device whose random state is contained too, next to that of the CPU.

    >>> def draw():
    ...     with contained_random((1, 2)):
    ...         return torch.rand(2).tolist()
    >>> before = torch.get_rng_state()
    >>> draw() == draw(), torch.equal(before, torch.get_rng_state())
    (True, True)
    """
    device, mixed = torch.device(device), _mixed(seed)
    cuda = device.type == "cuda"
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[device] if cuda else []):
        try:
            random.seed(mixed)
            if numpy["bit_generator"] == "MT19937":  # else one that numpy.random.seed refuses
                np.random.seed(mixed % 2**32)
            torch.default_generator.manual_seed(mixed)  # torch.manual_seed would reach all accelerators
            if cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(mixed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _mixed(seed: Sequence[int]) -> int:
    # Two words for each number, and how many there are: SeedSequence takes (1,) and (1, 0) for the same.
    words = [len(seed)]
    for number in seed:
        if isinstance(number, bool):
            raise TypeError(f"seed must hold integers, got {number!r} in {tuple(seed)!r}.")
        try:
            whole = operator.index(number)
        except TypeError:
            raise TypeError(f"seed must hold integers, got {number!r} in {tuple(seed)!r}.") from None
        if not 0 <= whole < 2**64:
            raise ValueError(f"seed must hold integers from 0 to 2**64 - 1, got {whole}.")
        words += [whole % 2**32, whole >> 32]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
