"""Puts together what the pieces of a batch put out, as the whole batch would have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_speedkit.optimize.batch_split import mapping_like, sequence_like

__all__ = ["join_outputs"]


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
        kinds = sorted({type(output).__name__ for output in outputs})
        raise ValueError(f"Outputs of types {' and '.join(kinds)} cannot be joined.")
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
        return mapping_like(first, {key: join_outputs([o[key] for o in outputs], sizes, weights) for key in first})
    elif isinstance(first, (list, tuple)) and all(len(output) == len(first) for output in outputs):
        return sequence_like(first, [join_outputs(entries, sizes, weights) for entries in zip(*outputs, strict=True)])
    elif all(output == first for output in outputs):
        return first
    raise ValueError(f"Outputs of type {type(first).__name__} cannot be joined: they differ in length or value.")


def _mean(values: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    kind = values[0].dtype if values[0].is_floating_point() or values[0].is_complex() else torch.get_default_dtype()
    total, mean = sum(weights), values[0].new_zeros((), dtype=kind)
    if not isinstance(total, Tensor) and total == 0:
        total = float("nan")  # as the mean over nothing
    for value, weight in zip(values, weights, strict=True):
        share = weight / total
        if isinstance(share, Tensor):
            share = share.to(mean)
            mean = mean + (value * share).where(share != 0, 0.0)
        elif share:
            mean = mean + value * share
    return mean
