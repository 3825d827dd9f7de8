"""Cuts a batch into smaller ones along its samples.

When it helps: a batch that does not fit into memory is computed in pieces. What it costs: nothing for tensors and
arrays, whose pieces are views; packed and nested sequences are copied. No value is looked at.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_speedkit.measure.samples import tensors_in

__all__ = ["mapping_like", "samples_of", "sequence_like", "split_batch"]

_SHARED = (bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype, type(None))


def samples_of(batch: Any, dim: int = 0, strict: bool = True) -> int:
    """The number of samples in a batch: the length of the batch dimension that all of its tensors share.

    Looks into mappings, sequences and dataclasses. Tensors and arrays with fewer dimensions are taken at their last
    one (the lengths beside a time-first padded sequence), and those without a dimension belong to every sample; a batch
    of nothing else is one sample. Where tensors differ, or there is none, or a field is a list of mappings, the
    outermost fields may be lists or tuples of single samples of one length. If several fields agree in themselves and
    differ from each other, they are taken for batches of several loaders, and the number cannot be told.

    Args:
        batch: The batch.
        dim: The batch dimension: 0, or 1 for padded sequences that are time first.
        strict: Whether something of an unknown type is an error, since it may have samples; else it is passed over.

    Raises:
        ValueError: The number cannot be told.
        TypeError: ``strict``, and something in the batch is of a type that is not known to have no samples.

    >>> samples_of({"tokens": torch.zeros(5, 8), "lengths": torch.zeros(8), "name": "a"}, dim=1)
    8
    >>> samples_of(([torch.zeros(3, 20, 30), torch.zeros(3, 10, 40)], [{"boxes": torch.zeros(1, 4)}, {"boxes": None}]))
    2
    """
    return _counted(batch, dim, strict)[0]


def _counted(batch: Any, dim: int, strict: bool = True) -> tuple[int, bool]:
    """The number of samples, and whether the lists among the outermost fields hold one in each entry."""
    lengths, fields = set(_lengths(batch, dim, strict)), _fields(batch)
    columns = {len(field) for field in fields if _is_column(field)}
    others = {length for field in fields if not _is_column(field) for length in _lengths(field, dim, strict)}
    rows = any(isinstance(entry, Mapping) for field in fields if _is_column(field) for entry in field)  # of a detector
    if len(lengths) == 1 and not (rows and len(columns) == 1 and others <= columns):
        return lengths.pop(), False
    own = [set(_lengths(field, dim, strict)) for field in fields if _is_column(field)]
    several = len(own) > 1 and not rows and not others and all(len(found) == 1 for found in own)
    if len(columns) == 1 and others <= columns and not several:
        return columns.pop(), True
    if not lengths and not columns and next(tensors_in(batch), None) is not None:
        return 1, False
    listed = " and ".join(map(str, sorted(lengths)))
    found = f"its tensors have batch dimensions of {listed}" if lengths else "it has no tensor"
    raise ValueError(f"Cannot tell the samples of a {type(batch).__name__}: {found}.")


def split_batch(batch: Any, size: int, dim: int = 0) -> list[Any]:
    """Batches of at most ``size`` samples, as equal as can be, that hold the samples of the batch in its order.

    They have the structure of the batch; tensors are views. What belongs to every sample (numbers, strings, tensors
    without a dimension) is in each of them.

    Args:
        batch: Tensors, arrays, packed or nested sequences, and mappings, sequences and dataclasses of them.
        size: The most samples that a piece may have, 1 or more.
        dim: The batch dimension, as in :func:`samples_of`.

    Raises:
        ValueError: ``size`` is below 1, or the batch cannot be split.
        TypeError: The batch holds something of a type that cannot be split.

    >>> [piece["x"].tolist() for piece in split_batch({"x": torch.arange(5), "scale": 2.0}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    if size < 1:
        raise ValueError(f"size={size} must be 1 or more.")
    samples, by_columns = _counted(batch, dim)
    count = max(-(-samples // size), 1)
    sizes = [samples // count + (index < samples % count) for index in range(count)]
    return _parts(batch, sizes, dim, by_columns)


def _fields(batch: Any) -> list[Any]:
    """The outermost entries of a batch; none if it is no container."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _is_column(field: Any) -> bool:
    return isinstance(field, list) or type(field) is tuple


def _is_nested(value: Tensor) -> bool:
    return bool(value.is_nested)


def _along(value: Tensor | numpy.ndarray[Any, Any], dim: int) -> int:
    return min(dim, value.ndim - 1)


def _lengths(value: Any, dim: int, strict: bool = True) -> Iterator[int]:
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif isinstance(value, Tensor) and _is_nested(value):
        yield value.size(0)
    elif isinstance(value, (Tensor, numpy.ndarray)):
        if value.ndim:
            yield value.shape[_along(value, dim)]
    elif isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value):
        for field in _fields(value):
            yield from _lengths(field, dim, strict)
    elif strict and not isinstance(value, (*_SHARED, numpy.generic)):
        raise TypeError(
            f"A batch that holds a {type(value).__module__}.{type(value).__qualname__} cannot be split into samples."
        )


def _parts(value: Any, sizes: list[int], dim: int, by_columns: bool) -> list[Any]:
    """The value cut into pieces of these sizes; ``by_columns``: lists among its outermost fields hold samples."""
    if isinstance(value, PackedSequence):
        return _packed_parts(value, sizes)
    if isinstance(value, Tensor) and _is_nested(value):
        rows = _cut(list(value.unbind()), sizes)
        return [torch.nested.as_nested_tensor(part, layout=value.layout) for part in rows]
    if isinstance(value, Tensor):
        return list(torch.split(value, sizes, _along(value, dim))) if value.ndim else [value] * len(sizes)
    if isinstance(value, numpy.ndarray):
        cuts = numpy.cumsum(sizes[:-1])
        return list(numpy.split(value, cuts, axis=_along(value, dim))) if value.ndim else [value] * len(sizes)
    fields = _fields(value)
    if not fields:
        return [value] * len(sizes)
    columns = [_field_parts(field, sizes, dim, by_columns) for field in fields]
    rebuild: Callable[[list[Any]], Any]
    if isinstance(value, Mapping):
        rebuild = lambda row: mapping_like(value, dict(zip(value, row, strict=True)))  # noqa: E731
    elif isinstance(value, (list, tuple)):
        if len(value) == sum(sizes) and _is_one_for_each(value, dim):
            return _cut(value, sizes)
        rebuild = lambda row: sequence_like(value, row)  # noqa: E731
    else:
        rebuild = lambda row: _dataclass_like(value, row)  # noqa: E731
    return [rebuild(list(row)) for row in zip(*columns, strict=True)]


def _field_parts(field: Any, sizes: list[int], dim: int, by_columns: bool) -> list[Any]:
    if by_columns and _is_column(field):
        return _cut(field, sizes)
    return _parts(field, sizes, dim, by_columns=False)


def _is_one_for_each(value: Any, dim: int) -> bool:
    """Whether a list or tuple as long as the batch has samples in it: names, or in a list numbers.

    torch's own collation makes a tuple of the names in samples that are tuples.
    """
    if type(value) is tuple:
        return all(isinstance(entry, (str, bytes)) for entry in value)
    return isinstance(value, list) and not list(_lengths(value, dim))


def _cut(samples: Sequence[Any], sizes: list[int]) -> list[Any]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _packed_parts(packed: PackedSequence, sizes: list[int]) -> list[Any]:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return [
        pack_padded_sequence(rows[:, : int(length.max())], length, batch_first=True, enforce_sorted=False)
        for rows, length in zip(torch.split(padded, sizes), torch.split(lengths, sizes), strict=True)
    ]


def mapping_like(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other entries.

    >>> mapping_like({"x": 1}, {"x": 2})
    {'x': 2}
    """
    if type(value) is dict:
        return entries
    twin = copy.copy(value)  # keeps what a subclass holds beside its entries, as a default factory
    for key, entry in entries.items():
        twin[key] = entry  # type: ignore[index]
    return twin


def sequence_like(value: Any, entries: list[Any]) -> Any:
    """A list, tuple or named tuple of the same kind with other entries.

    >>> sequence_like((1, 2), [3, 4])
    (3, 4)
    """
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _dataclass_like(value: Any, entries: list[Any]) -> Any:
    twin = copy.copy(value)
    for field, entry in zip(dataclasses.fields(value), entries, strict=True):
        object.__setattr__(twin, field.name, entry)  # also where it is frozen
    return twin
