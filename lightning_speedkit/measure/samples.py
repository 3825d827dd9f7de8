"""Finds the tensors of a batch, and counts its samples without looking at a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["count_samples", "tensors_in"]


def count_samples(batch: Any) -> int:
    """The size of the first dimension of the first tensor in the batch that has one.

    Looks through mappings, sequences and dataclasses in their own order and reads shapes only, so nothing waits for a
    device. A sequence without any tensor counts its elements. 0 if there is nothing to count.

    >>> import torch
    >>> count_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8)})
    8
    >>> count_samples([torch.tensor(0.5), torch.zeros(3, 2)])
    3
    >>> count_samples((["a", "b"], torch.zeros(2)))
    2
    >>> count_samples(["a", "b", "c"])
    3
    """
    for tensor in tensors_in(batch):
        if tensor.ndim:
            return tensor.shape[0]
    return len(batch) if isinstance(batch, (list, tuple)) else 0


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch in their own order: it looks through mappings, lists, tuples and dataclasses.

    >>> import torch
    >>> [len(tensor) for tensor in tensors_in({"x": [torch.zeros(2), "no tensor"], "y": torch.zeros(3)})]
    [2, 3]
    """
    parts: Any = ()
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    for part in parts:
        yield from tensors_in(part)
