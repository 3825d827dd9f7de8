"""A batch as a description and a buffer: what travels between a worker and the loader.

The tensors of a batch lie in one buffer. The batch itself is a tree, as collate made it, whose tensors are replaced by
:class:`Placed`: where in the buffer, which dtype and shape. The tree is small and can be pickled; the bytes stay where
they are. What does not fit the buffer, or is no tensor, stays in the tree as it is.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_speedkit.data.loading.ring import ALIGNMENT, tensor_at

__all__ = ["Arena", "Placed", "is_plain", "pickled", "restore", "stow", "walk"]


class Placed(NamedTuple):
    """A tensor in a buffer, row-major from byte ``start``; ``channels_last`` moves the last dimension to the second."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool = False


class Arena:
    """Hands out the memory of one buffer, from its beginning on; without a buffer, or when it is full, fresh memory.

    >>> arena = Arena(np.zeros(256, dtype=np.uint8))
    >>> first = arena.empty((2, 3), torch.float32)
    >>> arena.placed(first)
    Placed(start=0, dtype=torch.float32, shape=(2, 3), channels_last=False)
    >>> arena.placed(torch.zeros(2)) is None
    True
    """

    def __init__(self, memory: NDArray[np.uint8] | None) -> None:
        self._memory = memory
        self._next = 0
        self._places: dict[int, Placed] = {}  # by address: torch gives new objects for one tensor
        self.wanted_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        start = self._next
        self.wanted_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        if self._memory is None or not size or start + size > len(self._memory):
            return torch.empty(shape, dtype=dtype)
        self._next = start + -(-size // ALIGNMENT) * ALIGNMENT
        part = self._memory[start : start + size]
        tensor = tensor_at(part.ctypes.data, shape, dtype, part)
        self._places[tensor.data_ptr()] = Placed(start, dtype, shape)
        return tensor

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """Where a tensor lies, if it is, whole, one that :meth:`empty` gave."""
        if not tensor.numel():
            return None if self._memory is None else Placed(0, tensor.dtype, tuple(tensor.shape))
        place = self._places.get(tensor.data_ptr())
        whole = place is not None and (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
        return place if whole and tensor.is_contiguous() and not tensor.requires_grad else None


def stow(batch: Any, arena: Arena) -> Any:
    """The batch with its tensors placed in the arena's buffer; what lies elsewhere is copied there if it fits."""

    def place(tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            return tensor
        found = arena.placed(tensor)
        if found is not None:
            return found
        copy = arena.empty(tuple(tensor.shape), tensor.dtype)
        found = arena.placed(copy)
        if found is None or not tensor.is_contiguous():  # its own strides are part of the batch
            return tensor
        copy.copy_(tensor)
        return found

    return walk(batch, torch.Tensor, place)


def restore(batch: Any, memory: NDArray[np.uint8], owner: Any) -> Any:
    """The batch with tensors over the memory, which keep ``owner`` alive; each has a storage of its own size."""
    address = memory.ctypes.data

    def tensor(placed: Placed) -> torch.Tensor:
        if 0 in placed.shape:
            return torch.empty(placed.shape, dtype=placed.dtype)
        found = tensor_at(address + placed.start, placed.shape, placed.dtype, owner)
        return found.movedim(-1, 1) if placed.channels_last else found

    return walk(batch, Placed, tensor)


def pickled(tree: Any) -> bytes:
    """A tree as bytes for ``pickle.loads``, whatever dtype the tensors have that are still in it.

    By itself torch cannot load the newer ones again that plain pickle has written, such as uint16 and float8.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(tree)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_plain(value) or value.is_conj() or value.is_neg():
            return NotImplemented
        if not value.is_contiguous():
            return NotImplemented
        return _tensor_of, (value.view(-1).view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but its bytes and shape."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return plain and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)


def walk(node: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same containers with every leaf of that kind changed; containers of other classes are left as they are."""
    if isinstance(node, kind):
        return change(node)
    if type(node) is dict:
        return {key: walk(value, kind, change) for key, value in node.items()}
    if isinstance(node, tuple) and (type(node) is tuple or hasattr(node, "_fields")):
        values = [walk(value, kind, change) for value in node]
        return tuple(values) if type(node) is tuple else type(node)(*values)
    if type(node) is list:
        if node and not isinstance(node[0], torch.Tensor | dict | tuple | list):
            return node  # texts and the like, one per sample
        return [walk(value, kind, change) for value in node]
    return node
