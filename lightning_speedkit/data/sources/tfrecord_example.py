"""Reads ``tf.train.Example`` messages, without TensorFlow and without protobuf.

The message is a map from names to lists of bytes, floats or integers; its wire format is public and small enough to
read here. Source: ``tensorflow/core/example/example.proto`` and ``feature.proto``; protobuf's encoding guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExampleFault", "Feature", "parse_example"]

Feature = list[bytes] | NDArray[Any]
"""A bytes list, or an array of float32 or int64."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class ExampleFault(Exception):
    """The bytes are not an Example message; the text says why."""


def parse_example(message: bytes) -> dict[str, Feature]:
    """The features of a message, by their names in alphabetical order.

    A feature that is there without values is an empty list of bytes.

    Raises:
        ExampleFault: the message is damaged, or is not an Example.

    >>> parse_example(bytes.fromhex("0a0d0a0b0a016112061a040a022a07"))
    {'a': array([42,  7])}
    """
    features: dict[str, Feature] = {}
    for field, wire, value in _fields(message):
        if field == 2:
            raise ExampleFault("it is a SequenceExample, which is not read; give module:function that parses it")
        if field != 1 or wire != _LENGTH:
            raise ExampleFault(f"it is not a tf.train.Example (it has the field {field})")
        for entry_field, entry_wire, entry in _fields(_bytes(value)):
            if entry_field != 1 or entry_wire != _LENGTH:
                raise ExampleFault("it is not a tf.train.Example (its features are not a map)")
            name, feature = _entry(_bytes(entry))
            features[name] = feature
    return dict(sorted(features.items()))


def _entry(message: bytes) -> tuple[str, Feature]:
    name, feature = "", b""
    for field, wire, value in _fields(message):
        if wire == _LENGTH and field == 1:
            try:
                name = _bytes(value).decode()
            except UnicodeDecodeError:
                raise ExampleFault("it is not a tf.train.Example (a name is not text)") from None
        elif wire == _LENGTH and field == 2:
            feature = _bytes(value)
    return name, _feature(feature)


def _feature(message: bytes) -> Feature:
    for field, wire, value in _fields(message):
        if wire != _LENGTH or field not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            raise ExampleFault(f"it is not a tf.train.Example (a feature has the field {field})")
        values = list(_fields(_bytes(value)))
        if any(number != 1 for number, _, _ in values):
            raise ExampleFault("it is not a tf.train.Example (a list has other fields than its values)")
        if field == _BYTES_LIST:
            return [_bytes(item) for _, _, item in values]
        if field == _FLOAT_LIST:
            return _floats([item for _, _, item in values])
        return _integers([item for _, _, item in values])
    return []


def _floats(parts: list[bytes | int]) -> NDArray[Any]:
    data = b"".join(_bytes(part) for part in parts)  # packed, or four bytes for each value
    if len(data) % 4:
        raise ExampleFault("a list of floats ends inside a value")
    return np.frombuffer(data, "<f4").astype(np.float32)


def _integers(parts: list[bytes | int]) -> NDArray[Any]:
    values: list[int] = []
    for part in parts:
        if isinstance(part, int):
            values.append(part)
            continue
        position = 0
        while position < len(part):
            value, position = _varint(part, position)
            values.append(value)
    return np.array(values, np.uint64).view(np.int64)  # a negative number is its two's complement of 64 bits


def _bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ExampleFault("it is not a tf.train.Example (a number stands where bytes belong)")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Field number, wire type, and the value: a number for a varint, else its bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            number, position = _varint(message, position)
            yield field, wire, number
            continue
        if wire == _LENGTH:
            size, position = _varint(message, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ExampleFault(f"it is not a tf.train.Example (wire type {wire})")
        if field == 0 or position + size > len(message):
            raise ExampleFault("it ends inside a field, or is not a tf.train.Example")
        yield field, wire, message[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ExampleFault("it ends inside a number, or is not a tf.train.Example")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
