"""Batches made by a builder without workers, and put together again as a loader does."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_speedkit.data.loading.batch_layout import pickled, restore
from lightning_speedkit.data.loading.batch_task import BatchBuilder, BatchTask

KEY = (3, 0, 0, 0)


def task_of(samples: Sequence[int], key: tuple[int, ...] = KEY) -> BatchTask:
    return BatchTask(0, np.array(samples, dtype=np.int64), key)


def built(builder: BatchBuilder, samples: Sequence[int], size: int | None = 1 << 20, randomness: str = "set") -> Any:
    """A batch made in a slot of that size, or without one."""
    memory = None if size is None else np.full(size, 0xAA, dtype=np.uint8)
    tree, wanted = builder.build(task_of(samples), memory, randomness)
    if memory is None:
        return tree
    slot_bytes = builder.slot_bytes(len(samples))
    assert slot_bytes in (None, wanted)
    return restore(pickle.loads(pickled(tree)), memory, memory)


def states() -> tuple[Any, ...]:
    """The global random states of Python, NumPy and torch."""
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
