"""A batch to be made: its samples, what its randomness depends on, and what whoever makes it looks like.

A batch is a pure function of its task: the random state that a transform draws from is set before each batch and put
back after it, so a batch is the same whoever makes it, and after a resume.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_speedkit.data.loading.epoch_order import Integers

__all__ = ["BatchBuilder", "BatchTask", "listed", "message_of", "seeded"]


@dataclass(frozen=True, slots=True)
class BatchTask:
    """A batch to be made: its samples, and what its randomness depends on."""

    number: int
    samples: Integers
    key: tuple[int, ...]
    """Seed, epoch, rank and number of the batch: where the global random state of a transform begins."""


class BatchBuilder(Protocol):
    """Makes a batch as a tree (see ``batch_layout``) over the memory of a slot, or without a slot in fresh memory."""

    def slot_bytes(self, batch_size: int) -> int | None:
        """The memory of a batch, or ``None`` if only a batch shows it."""

    def build(self, task: BatchTask, memory: NDArray[np.uint8] | None, randomness: str) -> tuple[Any, int]:
        """The tree, and the bytes that its tensors need.

        ``randomness`` says what becomes of the global random state: ``"set"`` by the task's key, ``"put back"``
        afterwards, or ``"untouched"``, where other threads draw from it.
        """


@contextmanager
def seeded(key: Sequence[int], *, put_back: bool) -> Iterator[None]:
    """The global random state of Python, NumPy and torch (CPU), set from a key; as it was afterwards if asked."""
    words = np.random.SeedSequence(key).generate_state(4, np.uint32).tolist()
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if put_back else None
    try:
        random.seed(words[0] << 32 | words[1])
        np.random.seed(words[2])
        torch.default_generator.manual_seed(words[3] << 32 | words[0])
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def listed(samples: Integers) -> str:
    """The first few of these numbers, as text for an error."""
    shown = ", ".join(map(str, itertools.islice(samples.tolist(), 8)))
    return f"{shown}, ... ({len(samples)})" if len(samples) > 8 else shown


def message_of(error: BaseException) -> str:
    """What an exception says, also if it cannot.

    >>> message_of(ValueError("no"))
    'no'
    """
    try:
        return str(error)
    except Exception as other:
        return f"(its __str__ raised {type(other).__name__})"
