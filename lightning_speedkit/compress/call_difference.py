"""What is otherwise in a call than in the one that a network was quantized for, in words for the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["CALLED_LIKE_FLOAT", "TENSOR", "difference", "refusal_of_call", "same", "tensor_names"]

TENSOR = "<tensor>"  # stands for a tensor among arguments
CALLED_LIKE_FLOAT = "torch-ao-dynamic"  # the engine whose copies take every call that the float network takes


def difference(wanted: Mapping[str, Any], found: Mapping[str, Any], *, spread: Sequence[str] = ()) -> str:
    """What is otherwise in the arguments ``found`` than in ``wanted``, with a mark for each tensor, in words.

    ``spread`` names parameters such as ``**batch``, whose parts are arguments of their own.

    >>> difference({"x": "<tensor>", "labels": "<tensor>"}, {"x": "<tensor>", "labels": None})
    'labels is missing'
    >>> difference({"x": "<tensor>", "scale": 1.0}, {"x": "<tensor>", "scale": 2.0, "mask": "<tensor>"})
    'scale is 2.0, and was 1.0; mask is given, and was not'
    """
    was, now = (dict(_leaves(arguments, spread)) for arguments in (wanted, found))
    told = []
    for path in dict.fromkeys((*was, *now)):
        before, after = was.get(path), now.get(path)
        if same(before, after):
            continue
        if after is None:
            told.append(f"{path} is missing")
        elif before is None:
            told.append(f"{path} is given, and was not")
        else:
            told.append(f"{path} is {_said(after)}, and was {_said(before)}")
    return "; ".join(told) or "its arguments are nested otherwise"


def refusal_of_call(
    name: str, wanted: Mapping[str, Any], found: Mapping[str, Any], *, spread: Sequence[str] = ()
) -> str:
    """What is said of a call of the network ``name`` that has another form than the one it was quantized for."""
    told = difference(wanted, found, spread=spread)
    zeros = ": zeros of the same shape stand in for labels, and the loss made of them means nothing"
    return (
        f"The quantized forward of {name} can only be called as on the calibration batches: {told}. Give what it was "
        f"given there{zeros if 'is missing' in told else ''}. Or quantize with backend={CALLED_LIKE_FLOAT!r}, whose "
        "copies are called like the float model."
    )


def tensor_names(arguments: Mapping[str, Any], *, spread: Sequence[str] = ()) -> list[str]:
    """How a caller names each tensor among ``arguments``, in their order.

    >>> tensor_names({"x": "<tensor>", "scale": 2.0, "batch": {"labels": "<tensor>"}}, spread=["batch"])
    ['x', 'labels']
    """
    return [path for path, value in _leaves(arguments, spread) if same(value, TENSOR)]


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal; what cannot be asked so is not."""
    try:
        return bool(one == other)
    except Exception:  # an array of NumPy answers with one truth value per element
        return False


def _leaves(arguments: Mapping[str, Any], spread: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        if name in spread and isinstance(value, Mapping):
            yield from _leaves(value, ())
        else:
            yield from _leaves_of(str(name), value)


def _leaves_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves_of(f"{path}[{key!r}]", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves_of(f"{path}[{index}]", part)
    else:
        yield path, value


def _said(value: Any) -> str:
    return "a tensor" if same(value, TENSOR) else f"{' '.join(repr(value).split()):.60}"
