"""The random states of all ranks in one checkpoint; Lightning keeps none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["gather_random_states", "random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """The states of this process, as tensors and plain numbers: Python's, NumPy's, torch's and that of its GPU.

    >>> states = random_states()
    >>> first = torch.rand(2), random.random(), np.random.rand()
    >>> restore_random_states(states)
    >>> second = torch.rand(2), random.random(), np.random.rand()
    >>> torch.equal(first[0], second[0]) and first[1:] == second[1:]
    True
    """
    name, keys, *numbers = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(n) for n in numbers)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on with the random numbers where :func:`random_states` was called."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def gather_random_states(world_size: int) -> list[dict[str, Any]]:
    """Those of all ranks, in their order, on rank 0; an empty list on the others. To be called on all."""
    if world_size == 1:
        return [random_states()]
    first = torch.distributed.get_rank() == 0
    found: list[Any] | None = [None] * world_size if first else None
    torch.distributed.gather_object(random_states(), found, dst=0)
    return found or []
