"""A list of samples as one batch, with the structure kept and no value changed to the type of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.loading.batch_layout import is_plain

__all__ = ["Empty", "collate_into", "collate_samples"]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives an uninitialised CPU tensor of a shape and dtype."""

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}


def collate_samples(samples: Sequence[Any]) -> Any:
    """Stack samples: tuples stay tuples, dicts dicts, and every leaf becomes one batched value.

    Tensors and arrays are stacked along a new first dimension; ``int`` becomes int64, ``float`` float32 and ``bool``
    a bool tensor; str, bytes and ``None`` become a list. Differs from torch's ``default_collate`` in that a tuple stays
    a tuple and a Python float is float32, as a model's weights are. A float32 has 24 bits: store what needs more, such
    as a time in seconds, as a float64 tensor or as an ``int``.

    Raises:
        ValueError: a field has different shapes, lengths or keys in the samples, or an ``int`` that is no int64; it
            names the field.
        TypeError: a field has different types or dtypes in the samples (also ``int`` and ``float``, ``bool`` and
            ``int``), or a type that has no batch form.

    >>> collate_samples([(torch.zeros(2), 1, {"weight": 0.5}), (torch.ones(2), 2, {"weight": 1.5})])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([1, 2]), {'weight': tensor([0.5000, 1.5000])})
    """
    return _collate(samples, "", None)


def collate_into(samples: Sequence[Any], empty: Empty) -> Any:
    """:func:`collate_samples` into memory that ``empty`` gives: it is asked for each stacked tensor."""
    return _collate(samples, "", empty)


def _collate(values: Sequence[Any], place: str, empty: Empty | None) -> Any:
    first = values[0]
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        names = sorted({type(value).__name__ for value in values})
        raise TypeError(f"Field {place or 'sample'} holds {' and '.join(names)} in one batch: {_ONE_TYPE}")
    if isinstance(first, Mapping):
        _check_keys(values, place)
        return {key: _collate([value[key] for value in values], f"{place}[{key!r}]", empty) for key in first}
    if isinstance(first, tuple | list):
        if any(len(value) != len(first) for value in values):
            raise ValueError(f"Field {place or 'sample'} has lists of different lengths in one batch: {_PAD}")
        columns = [_collate([value[i] for value in values], f"{place}[{i}]", empty) for i in range(len(first))]
        if isinstance(first, list):
            return columns
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, torch.Tensor):
        return _stack(list(values), place, empty)
    if first is None or isinstance(first, str | bytes):
        return list(values)
    if isinstance(first, np.ndarray | np.generic):
        return _stack_arrays(values, place, empty)
    if type(first) in _NUMBERS:
        return _numbers(values, place)
    raise TypeError(
        f"Field {place or 'sample'} is {a_type(first)}, which has no batch form: convert it in the dataset's "
        f"transform, or override collate() of the DataModule."
    )


_ONE_TYPE = "convert them to one type in the dataset's transform, or override collate() of the DataModule."
_PAD = "pad them in the dataset's transform, or override collate() of the DataModule."


def _kind(value: Any) -> type:
    """What may stand together in one field: subclasses of these, and else only values of one type."""
    if value is None or isinstance(value, str | bytes):
        return str  # each is kept as it is in a list
    for kind in (torch.Tensor, np.ndarray, Mapping):
        if isinstance(value, kind):
            return kind
    return type(value)


def _check_keys(values: Sequence[Mapping[Any, Any]], place: str) -> None:
    odd = {repr(key): None for value in values for key in value.keys() ^ values[0].keys()}
    if odd:
        keys = ", ".join(sorted(odd))
        raise ValueError(f"Field {place or 'sample'}: not every sample of the batch has the keys {keys}.")


def _numbers(values: Sequence[Any], place: str) -> torch.Tensor:
    if type(values[0]) is int:
        for value in values:
            if not -(1 << 63) <= value < 1 << 63:
                raise ValueError(f"Field {place or 'sample'} is {value}, which does not fit into int64.")
    return torch.tensor(values, dtype=_NUMBERS[type(values[0])])


def _stack_arrays(values: Sequence[Any], place: str, empty: Empty | None) -> Any:
    dtypes = {value.dtype.newbyteorder("=") for value in values}
    if all(dtype.kind not in "biufc" for dtype in dtypes):
        return list(values)
    _check_one_dtype(dtypes, place)
    (dtype,) = dtypes
    try:  # torch takes neither negative strides nor the other byte order, and warns of read-only memory
        tensors = [torch.from_numpy(np.require(value, dtype, ["C", "W"])) for value in values]
    except TypeError as error:
        raise TypeError(f"Field {place or 'sample'} has the NumPy dtype {dtype}, which torch has not.") from error
    return _stack(tensors, place, empty)


def _check_one_dtype(dtypes: set[Any], place: str) -> None:
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"Field {place or 'sample'} has the dtypes {names} in one batch: {_ONE_TYPE}")


def _stack(tensors: list[torch.Tensor], place: str, empty: Empty | None) -> torch.Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"Field {place or 'sample'} has the shapes {sorted(shapes)} in one batch: {_PAD}")
    _check_one_dtype({tensor.dtype for tensor in tensors}, place)
    if empty is not None and all(is_plain(tensor) and not tensor.is_conj() for tensor in tensors):
        out = empty((len(tensors), *tensors[0].shape), tensors[0].dtype)
        return torch.stack(tensors, out=out)
    batch: torch.Tensor = default_collate(tensors)  # in a worker it stacks into shared memory at once
    return batch
