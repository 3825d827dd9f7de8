"""The structure of a batch, compared with torch's default_collate where the two agree."""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_speedkit.data import collate_samples
from lightning_speedkit.data.loading.collate import collate_into
from lightning_speedkit.data.store.leaf_codec import _TENSOR_TYPES
from tests.data.samples import same

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 2.0], torch.tensor([0.5, 2.0], dtype=torch.float32)),
        ([True, False], torch.tensor([True, False])),
        (["a", "b"], ["a", "b"]),
        ([None, "a", b"b"], [None, "a", b"b"]),  # a list keeps each as it is
        ([-(2**63), 2**63 - 1], torch.tensor([-(2**63), 2**63 - 1])),
        ([{"b": 1, "a": 2}, {"a": 4, "b": 3}], {"b": torch.tensor([1, 3]), "a": torch.tensor([2, 4])}),
        ([np.arange(4.0)[::-1], np.arange(8.0)[::2]], torch.tensor([[3.0, 2, 1, 0], [0, 2, 4, 6]]).double()),
        ([np.array([1, 2], ">i2"), np.array([3, 4], "<i2")], torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)),
        ([np.array(1.5, ">f8"), np.array(2.5, ">f8")], torch.tensor([1.5, 2.5], dtype=torch.float64)),
        ([np.frombuffer(b"ab", "u1")], torch.tensor([[97, 98]], dtype=torch.uint8)),  # read-only memory
        ([np.array(["a"]), np.array(["bc"])], [np.array(["a"]), np.array(["bc"])]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([None, None], [None, None]),
        ([np.float64(0.1), np.float64(0.2)], torch.tensor([0.1, 0.2], dtype=torch.float64)),
        ([np.uint8(3)], torch.tensor([3], dtype=torch.uint8)),
        ([np.zeros((2, 0)), np.zeros((2, 0))], torch.zeros(2, 2, 0, dtype=torch.float64)),
        ([np.array("2020-01-01", "<M8[D]")], [np.array("2020-01-01", "<M8[D]")]),
        ([torch.tensor(1.5)], torch.tensor([1.5])),
        ([(), ()], ()),
        ([(1, "a"), (2, "b")], (torch.tensor([1, 2]), ["a", "b"])),
        ([[1, 2.0]], [torch.tensor([1]), torch.tensor([2.0])]),
        ([{"a": (1,)}, {"a": (2,)}], {"a": (torch.tensor([1, 2]),)}),
        ([Pair(1, 2), Pair(3, 4)], Pair(torch.tensor([1, 3]), torch.tensor([2, 4]))),
    ],
)
def test_batches(values: list[Any], expected: Any) -> None:
    found = collate_samples(values)
    assert type(found) is type(expected)
    _assert_same(found, expected)


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found == expected


def test_tensors_as_default_collate_stacks_them() -> None:
    samples = [{"x": torch.randn(3, 2), "y": [torch.randint(9, (4,))]} for _ in range(5)]
    _assert_same(collate_samples(samples), default_collate(samples))
    loader = DataLoader(samples, batch_size=5, num_workers=1, collate_fn=collate_samples)
    batch = next(iter(loader))
    _assert_same(batch, default_collate(samples))
    assert batch["x"].is_shared()


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], ValueError, r"\['x'\] has the shapes \[\(2,\), \(3,\)\]"),
        ([(1, [1, 2]), (1, [1])], ValueError, r"\[1\] has lists of different lengths"),
        ([(object(),)], TypeError, r"\[0\] is an object"),
        ([{"i": 1}, {"i": 2**63}], ValueError, r"\['i'\] is 9223372036854775808, which does not fit into int64"),
        ([(np.longdouble(1),)], TypeError, r"\[0\] has the NumPy dtype .*, which torch has not"),
        ([{"a": 1}, {"a": 2, "b": 3}], ValueError, r"Field sample: not every sample of the batch has the keys 'b'"),
        (
            [({"a": 1, "b": 2},), ({"a": 2},)],
            ValueError,
            r"Field \[0\]: not every sample of the batch has the keys 'b'",
        ),
        ([{"a": 1}, {"b": 1}], ValueError, r"has the keys 'a', 'b'"),
    ],
)
def test_what_has_no_batch_form(values: list[Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        collate_samples(values)


class Own(torch.Tensor):
    """A subclass, which may stand beside plain tensors."""


MIXED = [
    (1, 2.5, "float and int"),
    (True, 3, "bool and int"),
    (True, 0.5, "bool and float"),
    (1, torch.tensor(2.5), "Tensor and int"),
    (1, np.int64(2), "int and int64"),
    (1.0, np.float64(2), "float and float64"),
    (1, None, "NoneType and int"),
    ("ab", ["a", "b"], "list and str"),
    ((1, 2), [1, 2], "list and tuple"),
    ((1, 2), 3, "int and tuple"),
    ({"a": 1}, (1,), "dict and tuple"),
    (Pair(1, 2), (1, 2), "Pair and tuple"),
    (np.zeros(2), torch.zeros(2), "Tensor and ndarray"),
    (torch.zeros(1, dtype=torch.int32), torch.tensor([2**40]), "the dtypes torch.int32, torch.int64"),
    (torch.zeros(1), torch.zeros(1, dtype=torch.float64), "the dtypes torch.float32, torch.float64"),
    (np.zeros(1, "<i4"), np.zeros(1, "<f4"), "the dtypes float32, int32"),
    (np.zeros(1), np.zeros(1, "<M8[s]"), "the dtypes datetime64"),
]


@pytest.mark.parametrize(("first", "second", "words"), MIXED, ids=[words for *_, words in MIXED])
def test_no_value_takes_the_type_of_another(first: Any, second: Any, words: str) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(TypeError, match=rf"Field \['x'\]\[0\] .*{re.escape(words)}.* in one batch"):
            collate_samples([{"x": [one]}, {"x": [other]}])


def test_subclasses_stand_beside_what_they_are_derived_from(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "a", "float32", "w+", shape=(2,))
    mapped[:] = 3
    _assert_same(collate_samples([mapped, np.ones(2, "float32")]), torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
    own = torch.ones(2).as_subclass(Own)
    assert torch.equal(torch.as_tensor(collate_samples([torch.zeros(2), own])), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert list(collate_samples([{"a": 1}, OrderedDict(a=2)])) == ["a"]


def test_read_only_arrays_bring_no_warning_and_are_not_changed() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collate_samples([array, array])
    batch += 1
    assert array.tolist() == [0.0, 1.0, 2.0]


class Given:
    """Gives tensors and remembers them; filled, so that what is not written shows."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        flat = torch.full((math.prod(shape) * dtype.itemsize,), 0xAA, dtype=torch.uint8)
        self.tensors.append(flat.view(dtype).view(shape))
        return self.tensors[-1]


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", _TENSOR_TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0)])
def test_every_dtype_is_stacked_into_given_memory(name: str, shape: tuple[int, ...]) -> None:
    dtype = _TENSOR_TYPES[name]
    size = math.prod(shape) * dtype.itemsize
    values = [torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8) for _ in range(3)]
    samples = [value.view(dtype).view(shape) for value in values]
    given = Given()
    found = collate_into([{"x": sample} for sample in samples], given.empty)["x"]
    assert found.data_ptr() == given.tensors[0].data_ptr()
    assert same(found, torch.cat(values).view(dtype).view(3, *shape))
    assert same(found, collate_samples(samples))


def test_what_is_stacked_lies_in_given_memory() -> None:
    samples: list[Any] = [
        (torch.full((2, 2), float(i)).t(), {"a": np.full(3, i, ">i4"), "b": [i, f"{i}"]}, np.float64(i), None)
        for i in range(4)
    ]
    given = Given()
    found = collate_into(samples, given.empty)
    _assert_same(found, collate_samples(samples))
    assert same(found, collate_samples(samples))
    stacked = [found[0], found[1]["a"], found[2]]
    assert [tensor.data_ptr() for tensor in stacked] == [tensor.data_ptr() for tensor in given.tensors]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(2, requires_grad=True)],
        [torch.ones(2).as_subclass(Own), torch.ones(2)],
        [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])],
    ],
    ids=["gradient", "subclass", "conjugated"],
)
def test_what_is_more_than_bytes_is_stacked_by_torch(samples: list[torch.Tensor]) -> None:
    given = Given()
    found = collate_into(samples, given.empty)
    expected = torch.stack(samples)
    assert given.tensors == []
    assert (type(found), found.requires_grad) == (type(expected), expected.requires_grad)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("values", "error"), [([1, 2.5], TypeError), ([torch.ones(1), torch.ones(2)], ValueError)])
def test_given_memory_does_not_change_what_is_refused(values: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="Field sample"):
        collate_into(values, Given().empty)
