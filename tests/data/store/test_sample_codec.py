"""What is written comes back the same: structure, type, dtype, shape and every bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_speedkit.data import LMDBDataset, LMDBWriter, write_lmdb
from lightning_speedkit.data.store.leaf_codec import _TENSOR_TYPES
from lightning_speedkit.errors import SampleMismatchError
from tests.data.samples import same

ARRAY_TYPES = ["?", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<M8[ns]", "<m8[s]", "<U3", "S4"]


def leaf_source() -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """A strategy of strategies: one kind of leaf, of which each sample then draws a value."""
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)

    def tensors(dtype: torch.dtype) -> st.SearchStrategy[Any]:
        def build(shape: tuple[int, ...], seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            size = math.prod(shape) * dtype.itemsize
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
            return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)

        return st.builds(build, shapes, st.integers(0, 99))

    def arrays(dtype: str) -> st.SearchStrategy[Any]:
        def build(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
            numbers = np.random.default_rng(seed).integers(0, 2, shape)
            return numbers.astype(dtype) if dtype[-1] != "4" or dtype[0] != "S" else numbers.astype("S4")

        return st.builds(build, shapes, st.integers(0, 99))

    return st.one_of(
        st.sampled_from(list(_TENSOR_TYPES.values())).map(tensors),
        st.sampled_from(ARRAY_TYPES).map(arrays),
        st.sampled_from(
            [
                st.integers(-(2**63), 2**63 - 1),
                st.floats(),
                st.booleans(),
                st.text(max_size=9),
                st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF), max_size=2),
                st.binary(max_size=9),
                st.none(),
                st.floats(width=32).map(np.float32),
                st.integers(0, 255).map(np.uint8),
            ]
        ),
    )


def sample_source() -> st.SearchStrategy[st.SearchStrategy[Any]]:
    keys = st.one_of(st.text(max_size=3), st.integers(-3, 3))

    def dicts(parts: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        return st.tuples(*parts.values()).map(lambda values: dict(zip(parts, values, strict=True)))

    return st.recursive(
        leaf_source(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda parts: st.tuples(*parts)),
            st.lists(inner, max_size=3).map(lambda parts: st.tuples(*parts).map(list)),
            st.dictionaries(keys, inner, max_size=3).map(dicts),
        ),
        max_leaves=5,
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data(), source=sample_source(), count=st.integers(1, 6))
def test_any_structure_comes_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, source: st.SearchStrategy[Any], count: int
) -> None:
    samples = [data.draw(source) for _ in range(count)]
    path = write_lmdb(samples, tmp_path_factory.mktemp("store") / "a.lmdb", block_bytes=4096)
    dataset = LMDBDataset(path)
    assert len(dataset) == count
    for i, sample in enumerate(samples):
        assert same(dataset[i], sample), (dataset[i], sample)


FIRST = {"x": torch.zeros(2), "y": [1, "a"]}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": torch.zeros(2, dtype=torch.float64), "y": [1, "a"]}, ["['x']", "tensor float32", "tensor float64"]),
        ({"x": np.zeros(2, dtype=np.float32), "y": [1, "a"]}, ["['x']", "tensor float32", "ndarray <f4"]),
        ({"x": torch.zeros(2), "y": [1.0, "a"]}, ["['y'][0]", "expected int", "got float"]),
        ({"x": torch.zeros(2), "y": [True, "a"]}, ["['y'][0]", "expected int", "got bool"]),
        ({"x": torch.zeros(2), "y": [2**63, "a"]}, ["['y'][0]", "64 bits"]),
        ({"x": torch.zeros(2), "y": [1, "a", 2]}, ["['y']", "expected 2 items", "got 3"]),
        ({"x": torch.zeros(2), "y": (1, "a")}, ["['y']", "expected a list", "got tuple"]),
        ({"x": torch.zeros(2), "z": [1, "a"]}, ["field sample", "['x', 'y']", "['x', 'z']"]),
        ({"x": object(), "y": [1, "a"]}, ["['x']", "tensor float32", "got object"]),
        (5, ["field sample", "expected a dict", "got int"]),
    ],
)
def test_a_sample_unlike_the_first_is_named_and_left_out(tmp_path: Path, second: Any, words: list[str]) -> None:
    with LMDBWriter(tmp_path / "a.lmdb") as writer:
        writer.write(FIRST)
        with pytest.raises(SampleMismatchError, match="Sample 1") as caught:
            writer.write(second)
        writer.write(FIRST)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(LMDBDataset(tmp_path / "a.lmdb")) == 2


def test_dicts_have_the_key_order_of_the_first_sample(tmp_path: Path) -> None:
    dataset = LMDBDataset(write_lmdb([{"b": 1, "a": "x"}, {"a": "y", "b": 2}], tmp_path / "a.lmdb"))
    assert [list(dataset[i].items()) for i in range(2)] == [[("b", 1), ("a", "x")], [("b", 2), ("a", "y")]]


@pytest.mark.parametrize("text", [np.str_(""), np.str_("abc"), np.bytes_(b""), np.bytes_(b"a\0")])
def test_a_numpy_scalar_of_text_is_refused_with_what_to_give(tmp_path: Path, text: Any) -> None:
    """Its dtype has its own length, of which NumPy makes 1 for an empty one."""
    with pytest.raises(TypeError, match=r"\['name'\] is a NumPy scalar (str|bytes)_.*give str\(x\) or bytes\(x\)"):
        write_lmdb([{"name": text}], tmp_path / "a.lmdb")
    with pytest.raises(SampleMismatchError, match=r"expected str as in the first sample, got (str|bytes)_"):
        write_lmdb([{"name": "a"}, {"name": text}], tmp_path / "a.lmdb")
    assert not list(tmp_path.iterdir())
