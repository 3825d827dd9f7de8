"""Cuts a batch into smaller ones along its samples, and puts the outputs of the pieces together again.

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

__all__ = ["join_outputs", "samples_of", "split_batch"]

_SHARED = (bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype, type(None))


def samples_of(batch: Any, dim: int = 0) -> int:
    """The number of samples in a batch: the length of the batch dimension that all of its tensors share.

    Looks into mappings, sequences and dataclasses. Tensors and arrays with fewer dimensions are taken at their last
    one (the lengths beside a time-first padded sequence), and those without a dimension belong to every sample. Where
    tensors differ, or there is none, the outermost fields may be lists of single samples of one length.

    Args:
        batch: The batch.
        dim: The batch dimension: 0, or 1 for padded sequences that are time first.

    Raises:
        ValueError: The number cannot be told.
        TypeError: Something in the batch is of a type that is not known to have no samples.

    >>> samples_of({"tokens": torch.zeros(5, 8), "lengths": torch.zeros(8), "name": "a"}, dim=1)
    8
    >>> samples_of(([torch.zeros(3, 20, 30), torch.zeros(3, 10, 40)], [{"boxes": torch.zeros(1, 4)}, {"boxes": None}]))
    2
    """
    lengths = set(_lengths(batch, dim))
    if len(lengths) == 1:
        return lengths.pop()
    columns = {len(field) for field in _fields(batch) if isinstance(field, list)}
    others = {length for field in _fields(batch) if not isinstance(field, list) for length in _lengths(field, dim)}
    if len(columns) == 1 and others <= columns:
        return columns.pop()
    found = f"its tensors have batch dimensions of {_listed(lengths)}" if lengths else "it has no tensor"
    raise ValueError(f"A {type(batch).__name__} cannot be split into samples: {found}.")


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
    samples = samples_of(batch, dim)
    count = max(-(-samples // size), 1)
    sizes = [samples // count + (index < samples % count) for index in range(count)]
    return _parts(batch, sizes, dim, by_columns=set(_lengths(batch, dim)) != {samples})


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[Any] | None = None) -> Any:
    """What the whole batch would have put out, from what its pieces put out.

    Tensors and lists with one entry per sample are put together; numbers and tensors without a dimension are taken as
    means, and averaged; mappings, tuples and lists are joined entry by entry; equal things stay.

    Args:
        outputs: One output for each piece.
        sizes: The number of samples of each piece.
        weights: What the pieces weigh in means, numbers or tensors of no dimension; ``None``: their samples. One of 0
            is passed over, since its mean may be no number.

    Raises:
        ValueError: The outputs have no form that can be joined.

    >>> pieces = {"loss": torch.tensor(1.0), "y": torch.ones(3)}, {"loss": torch.tensor(5.0), "y": torch.zeros(1)}
    >>> join_outputs(pieces, sizes=[3, 1])
    {'loss': tensor(2.), 'y': tensor([1., 1., 1., 0.])}
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise ValueError(f"Outputs of types {_listed({type(output).__name__ for output in outputs})} cannot be joined.")
    if isinstance(first, Tensor):
        if all(output.ndim and len(output) == size for output, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if all(output.numel() == 1 for output in outputs):
            return _mean(outputs, sizes if weights is None else weights)
    elif isinstance(first, float):
        numbers = [torch.tensor(output, dtype=torch.float64) for output in outputs]
        return _mean(numbers, sizes if weights is None else weights).item()
    elif isinstance(first, list) and all(len(output) == size for output, size in zip(outputs, sizes, strict=True)):
        return [entry for output in outputs for entry in output]
    elif isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return _mapping_like(first, {key: join_outputs([o[key] for o in outputs], sizes, weights) for key in first})
    elif isinstance(first, (list, tuple)) and all(len(output) == len(first) for output in outputs):
        return _sequence_like(first, [join_outputs(entries, sizes, weights) for entries in zip(*outputs, strict=True)])
    elif all(output == first for output in outputs):
        return first
    raise ValueError(f"Outputs of type {type(first).__name__} cannot be joined: they differ in length or value.")


def _mean(values: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    kind = values[0].dtype if values[0].is_floating_point() or values[0].is_complex() else torch.get_default_dtype()
    total, mean = sum(weights), values[0].new_zeros((), dtype=kind)
    for value, weight in zip(values, weights, strict=True):
        share = weight / total
        if isinstance(share, Tensor):
            share = share.to(mean)
            mean = mean + (value * share).where(share != 0, 0.0)
        elif share:
            mean = mean + value * share
    return mean


def _listed(values: Any) -> str:
    return " and ".join(map(str, sorted(values)))


def _fields(batch: Any) -> list[Any]:
    """The outermost entries of a batch; none if it is no container."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _is_nested(value: Tensor) -> bool:
    return bool(value.is_nested)


def _along(value: Tensor | numpy.ndarray[Any, Any], dim: int) -> int:
    return min(dim, value.ndim - 1)


def _lengths(value: Any, dim: int) -> Iterator[int]:
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif isinstance(value, Tensor) and _is_nested(value):
        yield value.size(0)
    elif isinstance(value, (Tensor, numpy.ndarray)):
        if value.ndim:
            yield value.shape[_along(value, dim)]
    elif isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value):
        for field in _fields(value):
            yield from _lengths(field, dim)
    elif not isinstance(value, (*_SHARED, numpy.generic)):
        raise TypeError(
            f"A batch that holds a {type(value).__module__}.{type(value).__qualname__} cannot be split into samples."
        )


def _parts(value: Any, sizes: list[int], dim: int, by_columns: bool) -> list[Any]:
    """The value cut into pieces of these sizes; ``by_columns``: the lists among its outermost fields hold samples."""
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
        rebuild = lambda row: _mapping_like(value, dict(zip(value, row, strict=True)))  # noqa: E731
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list) and not list(_lengths(value, dim)) and len(value) == sum(sizes):
            return _cut(value, sizes)  # names or numbers, one for each sample
        rebuild = lambda row: _sequence_like(value, row)  # noqa: E731
    else:
        rebuild = lambda row: _dataclass_like(value, row)  # noqa: E731
    return [rebuild(list(row)) for row in zip(*columns, strict=True)]


def _field_parts(field: Any, sizes: list[int], dim: int, by_columns: bool) -> list[Any]:
    if by_columns and isinstance(field, list):
        return _cut(field, sizes)
    return _parts(field, sizes, dim, by_columns=False)


def _cut(samples: list[Any], sizes: list[int]) -> list[Any]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _packed_parts(packed: PackedSequence, sizes: list[int]) -> list[Any]:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return [
        pack_padded_sequence(rows[:, : int(length.max())], length, batch_first=True, enforce_sorted=False)
        for rows, length in zip(torch.split(padded, sizes), torch.split(lengths, sizes), strict=True)
    ]


def _mapping_like(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return entries
    twin = copy.copy(value)  # keeps what a subclass holds beside its entries, as a default factory
    for key, entry in entries.items():
        twin[key] = entry  # type: ignore[index]
    return twin


def _sequence_like(value: Any, entries: list[Any]) -> Any:
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _dataclass_like(value: Any, entries: list[Any]) -> Any:
    twin = copy.copy(value)
    for field, entry in zip(dataclasses.fields(value), entries, strict=True):
        object.__setattr__(twin, field.name, entry)  # also where it is frozen
    return twin
