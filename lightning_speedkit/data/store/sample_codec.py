"""Samples as bytes and back, without pickle.

The first sample fixes a :class:`Schema`: its structure (tuples, lists, dicts, nested) and the type of every leaf. Each
sample is laid out by it (``sample_encoder.py`` does that): the bytes of the leaves one after the other, in depth-first
order, without padding. What a sample does not share with the first is only the shape of its leaves, so a store keeps
shapes and not types.

Costs: one copy on the way in and one on the way out. It is meant for the data that training reads: tensors, arrays,
numbers, strings and bytes. Anything that would need pickle is refused with a ``TypeError`` that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_speedkit.data.store.leaf_codec import Leaf, Shape, leaf_of
from lightning_speedkit.errors import StoreCorruptError

__all__ = ["Branch", "Schema"]

_CONTAINERS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}


@dataclass(frozen=True, slots=True)
class Branch:
    """A tuple, list or dict of a schema; ``keys`` are a dict's keys in the order of the first sample."""

    kind: str
    items: tuple[Branch | Leaf, ...]
    keys: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure of a sample and the type of each leaf.

    >>> import torch
    >>> schema = Schema.of({"image": torch.zeros(2, 3), "label": 7})
    >>> data = torch.arange(6.0).numpy().tobytes() + (9).to_bytes(8, "little")
    >>> schema.decode(data, [(2, 3), ()])
    {'image': tensor([[0., 1., 2.],
            [3., 4., 5.]]), 'label': 9}
    """

    root: Branch | Leaf

    @classmethod
    def of(cls, sample: Any) -> Schema:
        """The schema of a sample.

        Raises:
            TypeError: for a value that does not come back the same without pickle, with its place in the sample.
        """
        return cls(_node_of(sample, ""))

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Each leaf with its place in the sample, such as ``["image"]``, in the order of the bytes."""
        return _leaves(self.root, "")

    def decode(self, data: Any, shapes: Sequence[Shape]) -> Any:
        """The sample of these bytes (any buffer); nothing of the result shares memory with ``data``."""
        sample, end = _decode(self.root, memoryview(data).cast("B"), 0, iter(shapes))
        if end != len(data):
            raise StoreCorruptError(f"A sample has {len(data)} bytes, its shapes describe {end}.")
        return sample

    def to_json(self) -> dict[str, Any]:
        """The schema in plain JSON types."""
        return _to_json(self.root)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Schema:
        """The inverse of :meth:`to_json`."""
        return cls(_from_json(tree))


def _node_of(value: Any, place: str) -> Branch | Leaf:
    kind = _CONTAINERS.get(type(value))
    if kind is None:
        return leaf_of(value, place)
    if kind == "dict":
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"The sample{place} has the key {key!r}: a stored dict has keys of type str or int.")
        items = tuple(_node_of(item, f"{place}[{key!r}]") for key, item in value.items())
        return Branch(kind, items, tuple(value))
    return Branch(kind, tuple(_node_of(item, f"{place}[{i}]") for i, item in enumerate(value)))


def _leaves(node: Branch | Leaf, place: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(node, Leaf):
        yield place, node
        return
    for key, item in zip(node.keys or range(len(node.items)), node.items, strict=True):
        yield from _leaves(item, f"{place}[{key!r}]")


def _decode(node: Branch | Leaf, data: memoryview, start: int, shapes: Iterator[Shape]) -> tuple[Any, int]:
    if isinstance(node, Leaf):
        shape = next(shapes)
        end = start + node.byte_count(shape)
        if end > len(data):
            raise StoreCorruptError(f"A sample of {len(data)} bytes ends inside a field that needs {end}.")
        return node.decode(data[start:end], shape), end
    values = []
    for item in node.items:
        value, start = _decode(item, data, start, shapes)
        values.append(value)
    if node.kind == "dict":
        return dict(zip(node.keys, values, strict=True)), start
    return (tuple(values) if node.kind == "tuple" else values), start


def _to_json(node: Branch | Leaf) -> dict[str, Any]:
    if isinstance(node, Leaf):
        return {"kind": node.kind, "dtype": node.dtype} if node.dtype else {"kind": node.kind}
    tree: dict[str, Any] = {"kind": node.kind, "items": [_to_json(item) for item in node.items]}
    if node.kind == "dict":
        tree["keys"] = list(node.keys)
    return tree


def _from_json(tree: dict[str, Any]) -> Branch | Leaf:
    kind = tree["kind"]
    if kind in _CONTAINERS.values():
        return Branch(kind, tuple(_from_json(item) for item in tree["items"]), tuple(tree.get("keys", ())))
    return Leaf.named(kind, tree.get("dtype", ""))
