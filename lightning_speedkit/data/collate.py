"""A list of samples as one batch, with the structure kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

__all__ = ["collate_samples"]

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}


def collate_samples(samples: Sequence[Any]) -> Any:
    """Stack samples: tuples stay tuples, dicts dicts, and every leaf becomes one batched value.

    Tensors and arrays are stacked along a new first dimension; ``int`` becomes int64, ``float`` float32 and ``bool``
    a bool tensor; str, bytes and ``None`` become a list. Differs from torch's ``default_collate`` in that a tuple stays
    a tuple and a Python float is float32, as a model's weights are.

    Raises:
        ValueError: the tensors of a field have different shapes; it names the field.
        TypeError: a leaf of another type.

    >>> collate_samples([(torch.zeros(2), 1, {"weight": 0.5}), (torch.ones(2), 2, {"weight": 1.5})])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([1, 2]), {'weight': tensor([0.5000, 1.5000])})
    """
    return _collate(samples, "")


def _collate(values: Sequence[Any], place: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _collate([value[key] for value in values], f"{place}[{key!r}]") for key in first}
    if isinstance(first, tuple | list):
        if any(len(value) != len(first) for value in values):
            raise ValueError(f"Field {place or 'sample'} has lists of different lengths in one batch: {_PAD}")
        columns = [_collate([value[i] for value in values], f"{place}[{i}]") for i in range(len(first))]
        if isinstance(first, list):
            return columns
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, torch.Tensor):
        return _stack(list(values), place)
    if isinstance(first, np.ndarray | np.generic):
        if first.dtype.kind in "biufc":
            return _stack([torch.as_tensor(value) for value in values], place)
        return list(values)
    if type(first) in _NUMBERS:
        return torch.tensor(values, dtype=_NUMBERS[type(first)])
    if first is None or isinstance(first, str | bytes):
        return list(values)
    raise TypeError(
        f"Field {place or 'sample'} is a {type(first).__name__}, which has no batch form: convert it in the dataset's "
        f"transform, or override collate() of the DataModule."
    )


_PAD = "pad them in the dataset's transform, or override collate() of the DataModule."


def _stack(tensors: list[torch.Tensor], place: str) -> torch.Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"Field {place or 'sample'} has the shapes {sorted(shapes)} in one batch: {_PAD}")
    batch: torch.Tensor = default_collate(tensors)  # in a worker it stacks into shared memory at once
    return batch
