"""One value as bytes and back: tensors, arrays, numbers, strings, bytes and ``None``.

Each kind of leaf comes back with the type it had: a tensor with its dtype and shape, an array with its dtype, a Python
number as a Python number. What cannot come back the same (objects, sparse or quantized tensors, subclasses) is refused.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_speedkit.errors import StoreCorruptError

__all__ = ["Bytes", "Leaf", "LeafMismatch", "Shape", "leaf_of"]

Shape = tuple[int, ...]
Bytes = bytes | memoryview
"""With one dimension, of elements of one byte. A view shares the memory of the value."""

_PLAIN: dict[type, str] = {int: "int", float: "float", bool: "bool", str: "str", bytes: "bytes", type(None): "none"}
_TENSOR_TYPES: dict[str, torch.dtype] = {
    name: value
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if isinstance(value := getattr(torch, name, None), torch.dtype)
}
_TENSOR_NAMES = {dtype: name for name, dtype in _TENSOR_TYPES.items()}
_FIXED_BYTES = {"int": 8, "float": 8, "bool": 1, "none": 0}
_SCALAR_KINDS = "biufcMm"
_ARRAY_KINDS = _SCALAR_KINDS + "SU"


class LeafMismatch(Exception):
    """A value that is not of the leaf's type; the text has what was expected and what was got."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The type of one value: its kind, and for tensors and arrays the dtype.

    ``kind`` is ``tensor``, ``ndarray``, ``scalar`` (of NumPy), ``int``, ``float``, ``bool``, ``str``, ``bytes`` or
    ``none``; ``dtype`` is torch's name of the dtype or NumPy's ``dtype.str``; ``item_bytes`` the size of one element.

    >>> leaf = leaf_of(torch.zeros(3, dtype=torch.bfloat16))
    >>> leaf.kind, leaf.dtype, leaf.item_bytes
    ('tensor', 'bfloat16', 2)
    """

    kind: str
    dtype: str
    item_bytes: int

    @classmethod
    def named(cls, kind: str, dtype: str) -> Leaf:
        """The leaf of a kind and dtype as written in a store."""
        if kind == "tensor" and dtype in _TENSOR_TYPES:
            return cls(kind, dtype, _TENSOR_TYPES[dtype].itemsize)
        if kind in ("ndarray", "scalar"):
            return cls(kind, dtype, np.dtype(dtype).itemsize)
        if kind in _PLAIN.values():
            return cls(kind, "", _FIXED_BYTES.get(kind, 1))
        raise StoreCorruptError(f"The store has a field of an unknown type: {kind!r} {dtype!r}.")

    def byte_count(self, shape: Shape) -> int:
        """The number of bytes of a value of that shape."""
        return self.item_bytes * math.prod(shape)

    def encode(self, value: Any) -> tuple[Bytes, Shape]:
        """The bytes and the shape of a value; :class:`LeafMismatch` if it is of another type.

        :func:`~lightning_speedkit.data.store.sample_encoder.sample_encoder` has short ways to the same for many values.
        """
        got = _kind_and_dtype(value)
        if got != (self.kind, self.dtype):
            expected, found = (" ".join(part for part in pair if part) for pair in ((self.kind, self.dtype), got))
            raise LeafMismatch(f"expected {expected} as in the first sample, got {found or type(value).__name__}")
        if self.kind == "tensor":
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return memoryview(dense.reshape(-1).view(torch.uint8).numpy()), tuple(value.shape)
        if self.kind in ("ndarray", "scalar"):
            return value.tobytes(), tuple(value.shape)
        return _encode_plain(self.kind, value)

    def decode(self, data: memoryview, shape: Shape) -> Any:
        """The value of these bytes; it owns its memory and is writable."""
        if self.kind == "tensor":
            dtype = _TENSOR_TYPES[self.dtype]
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if self.kind in ("ndarray", "scalar"):
            array: Any = np.ndarray(shape, dtype=np.dtype(self.dtype), buffer=bytearray(data) if data else None)
            return array[()] if self.kind == "scalar" else array
        return _decode_plain(self.kind, data)


def leaf_of(value: Any, place: str = "") -> Leaf:
    """The leaf type of a value.

    Raises:
        TypeError: if the value would not come back the same without pickle.
    """
    found = _kind_and_dtype(value)
    if not found:
        raise TypeError(_why_not(value, f"The sample{place}"))
    return Leaf.named(*found)


def _kind_and_dtype(value: Any) -> tuple[str, str] | tuple[()]:
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain, ""
    if type(value) is torch.Tensor:
        dense = value.layout is torch.strided and value.dtype in _TENSOR_NAMES and not value.is_meta
        return ("tensor", _TENSOR_NAMES[value.dtype]) if dense else ()
    if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
        return "scalar", value.dtype.str
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in _ARRAY_KINDS:
        return "ndarray", value.dtype.str
    return ()


def _why_not(value: Any, where: str) -> str:
    name = type(value).__qualname__
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{where} is a namedtuple {name}, which only pickle restores: give tuple(x) or x._asdict()."
    if isinstance(value, dict):
        return f"{where} is a {name}: give a plain dict(x)."
    if isinstance(value, torch.Tensor):
        return (
            f"{where} is a {name} with dtype {value.dtype} and layout {value.layout}: only plain dense tensors of "
            f"{', '.join(_TENSOR_TYPES)} are stored; x.as_subclass(torch.Tensor) or x.to_dense() may help."
        )
    if isinstance(value, np.str_ | np.bytes_):
        return f"{where} is a NumPy scalar {name}, whose size varies with its text: give str(x) or bytes(x)."
    if isinstance(value, np.ndarray | np.generic):
        return f"{where} is a {name} of dtype {value.dtype}: objects, records and masked arrays are not stored."
    return (
        f"{where} is a {name}: a sample is made of tensors, NumPy arrays, int, float, bool, str, bytes, None, and "
        f"tuples, lists and dicts of them."
    )


def _encode_plain(kind: str, value: Any) -> tuple[Bytes, Shape]:
    if kind == "int":
        try:
            return struct.pack("<q", value), ()
        except struct.error:
            raise LeafMismatch(f"{value} does not fit into 64 bits; store it as a str") from None
    if kind == "float":
        return struct.pack("<d", value), ()
    if kind == "bool":
        return bytes([value]), ()
    if kind == "none":
        return b"", ()
    data: bytes = value.encode("utf-8", "surrogatepass") if kind == "str" else value
    return data, (len(data),)


def _decode_plain(kind: str, data: memoryview) -> Any:
    if kind == "int":
        return struct.unpack("<q", data)[0]
    if kind == "float":
        return struct.unpack("<d", data)[0]
    if kind == "bool":
        return data[0] != 0
    if kind == "none":
        return None
    return bytes(data).decode("utf-8", "surrogatepass") if kind == "str" else bytes(data)
