"""Counts the samples of a batch without looking at its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["count_samples"]


def count_samples(batch: Any) -> int:
    """The size of the first dimension of the first tensor in the batch that has one.

    Looks through mappings, sequences and dataclasses in their own order and reads shapes only, so nothing waits for a
    device. A sequence without any tensor counts its elements. 0 if there is nothing to count.

    >>> count_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8)})
    8
    >>> count_samples([torch.tensor(0.5), torch.zeros(3, 2)])
    3
    >>> count_samples((["a", "b"], torch.zeros(2)))
    2
    >>> count_samples(["a", "b", "c"])
    3
    """
    found = _first_dimension(batch)
    if found is None and isinstance(batch, (list, tuple)):
        return len(batch)
    return found or 0


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    for part in parts:
        size = _first_dimension(part)
        if size is not None:
            return size
    return None
