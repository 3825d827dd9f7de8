"""The names and shapes of a network's weights, by which a foreign network is told from the one that was quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

__all__ = ["shape_difference", "weight_shapes"]


def weight_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its name; of a float copy, in which weights have their plain names.

    >>> weight_shapes(nn.Sequential(nn.Linear(3, 2)))
    {'0.weight': (2, 3), '0.bias': (2,)}
    """
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def shape_difference(given: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> str:
    """In which weight a given network differs from the one in a file, in words; empty if in none.

    >>> shape_difference({"0.weight": (2, 3)}, {"0.weight": [4, 3]})
    "its parameter '0.weight' has shape (2, 3), in the file (4, 3)"
    >>> shape_difference({"head.bias": (2,)}, {}), shape_difference({}, {"body.bias": (2,)})
    ("its parameter 'head.bias' is not in the file", "it has no parameter 'body.bias', which is in the file")
    """
    for name in (*saved, *given):
        if name not in given:
            return f"it has no parameter {name!r}, which is in the file"
        if name not in saved:
            return f"its parameter {name!r} is not in the file"
        if tuple(given[name]) != tuple(saved[name]):
            return f"its parameter {name!r} has shape {tuple(given[name])}, in the file {tuple(saved[name])}"
    return ""
