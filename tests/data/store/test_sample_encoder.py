"""The short ways of encoding give what the careful way gives, and the careful way is taken where they do not apply."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.store.leaf_codec import _TENSOR_TYPES, leaf_of
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.data.store.sample_encoder import sample_encoder
from lightning_speedkit.errors import SampleMismatchError


def encoded(first: Any, value: Any) -> tuple[bytes, tuple[Any, ...]]:
    parts, shapes = sample_encoder(Schema.of(first))(value)
    for part in parts:
        assert isinstance(part, bytes) or (part.format, part.ndim) == ("B", 1)
    assert all(type(shape) is tuple for shape in shapes)
    return b"".join(parts), shapes


def tensor_variants(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 2, (6 * 4 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    base = raw.view(dtype).reshape(6, 4)
    variants = {"dense": base, "transposed": base.t(), "gaps": base[:, ::2], "offset": base[3:], "scalar": base[2, 3]}
    variants["empty"] = base[:0]
    variants["one row"] = base[1:2].t()
    if dtype.is_floating_point and dtype.itemsize > 1:
        variants["gradient"] = base.clone().requires_grad_()
    if dtype in (torch.complex64, torch.complex128):
        variants["conjugated"] = base.conj()
        variants["imaginary"] = base.conj().imag
    return variants


@pytest.mark.parametrize("name", list(_TENSOR_TYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_tensors_of_every_type_and_layout(name: str) -> None:
    for variant, tensor in tensor_variants(_TENSOR_TYPES[name]).items():
        data, shapes = encoded(tensor, tensor)
        assert shapes == (tuple(tensor.shape),), variant
        plain = tensor.detach().resolve_conj().resolve_neg()
        expected = b"".join(bytes(one.reshape(1).view(torch.uint8).tolist()) for one in plain.reshape(-1))
        assert data == expected, variant


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<u2", ">i4", "<i8", "<f2", ">f4", "<f8", "<c8", "<c16", "<M8[ns]", "<m8[s]", "<U3", "S4"]
)
def test_arrays_of_every_type_and_layout(tmp_path: Path, dtype: str) -> None:
    base = np.arange(24).astype(dtype).reshape(6, 4)
    mapped = np.memmap(tmp_path / "map", dtype, "w+", shape=(6, 4))
    mapped[:] = base
    read_only = base.copy()
    read_only.flags.writeable = False
    views = [base, base.T, base[:, ::2], base[::-1], base[3:], base[:0], base[1, 1:1], base[2, 3:].reshape(())]
    for array in (*views, mapped, read_only):
        assert encoded(base, array) == (array.tobytes(), (array.shape,))


def test_plain_values() -> None:
    sample = (-5, 2.5, True, "aä", b"\x00\xff", None, np.int16(7))
    expected = struct.pack("<qd?", -5, 2.5, True) + "aä".encode() + b"\x00\xff" + b"\x07\x00"
    assert encoded(sample, sample) == (expected, ((), (), (), (3,), (2,), (), ()))
    for number in (-(2**63), 2**63 - 1, 0):
        assert encoded(1, number) == (struct.pack("<q", number), ((),))


def test_nothing_is_copied_that_need_not_be() -> None:
    tensor, array, text = torch.zeros(5), np.zeros(7), b"bytes"
    encode = sample_encoder(Schema.of([tensor, array, text]))
    parts, _ = encode([tensor, array, text])
    tensor += 1
    array += 2
    assert np.frombuffer(parts[0], np.float32).tolist() == [1] * 5
    assert np.frombuffer(parts[1], np.float64).tolist() == [2] * 7
    assert parts[2] is text


class Subclass(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
        (torch.zeros(2), torch.zeros(2).to_sparse()),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.zeros(2, ">f8")),
        (np.zeros(2), np.zeros(2).view(Subclass)),
        (np.zeros(2), np.ma.masked_array([1.0], [True])),
        (1, True),
        (1, np.int64(1)),
        (1, 2**63),
        (b"a", bytearray(b"a")),
        (b"a", "a"),
        ((1,), [1]),
        ((1,), (1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 1, "b": 2}),
    ],
)
def test_no_short_way_lets_another_type_through(first: Any, second: Any) -> None:
    encode = sample_encoder(Schema.of({"deep": [first]}))
    with pytest.raises(SampleMismatchError, match=r"field \['deep'\]\[0\]"):
        encode({"deep": [second]})
    encode({"deep": [first]})


def test_no_warning_for_types_that_numpy_does_not_have() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("bfloat16", "float8_e5m2", "complex64"):
            sample_encoder(Schema.of(torch.zeros(2, dtype=_TENSOR_TYPES[name])))


def test_the_careful_way_is_the_same_for_a_leaf() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    data, shape = leaf_of(tensor).encode(tensor)
    assert (bytes(data), shape) == (tensor.numpy().tobytes(), (2, 3))
