"""What is written comes back the same: structure, type, dtype, shape and every bit."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_speedkit.data import LMDBDataset, LMDBWriter, write_lmdb
from lightning_speedkit.data.leaf_codec import _TENSOR_TYPES
from lightning_speedkit.errors import EmptyStoreError, SampleMismatchError
from tests.data.samples import same, varied_samples

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


def test_many_blocks_of_varied_samples(tmp_path: Path) -> None:
    samples = varied_samples(300)
    dataset = LMDBDataset(write_lmdb(iter(samples), tmp_path / "a.lmdb", block_bytes=4096))
    assert all(map(same, dataset.__getitems__(list(range(300))), samples))
    assert same(dataset[-1], samples[-1])


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 2)], [(3,), (3, 1), ()], [(0,), (5000,), (0, 7)]])
def test_shapes_may_vary_also_in_rank(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    samples = [torch.arange(float(math.prod(shape))).reshape(shape) for shape in shapes * 20]
    dataset = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096))
    assert all(map(same, dataset.__getitems__(range(len(samples))), samples))


@pytest.mark.parametrize("sizes", [[0], [1], [4096], [4097], [700], [64, 64, 64, 9000], [0, 0, 5000, 1]])
def test_sizes_around_a_block(tmp_path: Path, sizes: list[int]) -> None:
    samples = [bytes([i % 256]) * size for i, size in enumerate(sizes * 30)]
    path = write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096)
    assert LMDBDataset(path).__getitems__(range(len(samples))) == samples


def test_more_empty_samples_than_a_block_holds(tmp_path: Path) -> None:
    dataset = LMDBDataset(write_lmdb([()] * 10_000, tmp_path / "a.lmdb", block_bytes=4096))
    assert len(dataset) == 10_000
    assert dataset[9_999] == ()


class NumberedDataset(torch.utils.data.Dataset[Any]):
    """Map-style, and without the IndexError that would end an iteration over it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * 10


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NumberedDataset(), [0, 10, 20]),
        ((i for i in range(3)), [0, 1, 2]),
        (torch.arange(3.0), [torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)]),
        (np.arange(4).reshape(2, 2), [np.array([0, 1]), np.array([2, 3])]),
        ({"a", "b"}, None),
    ],
)
def test_sources(tmp_path: Path, source: Any, expected: list[Any] | None) -> None:
    dataset = LMDBDataset(write_lmdb(source, tmp_path / "a.lmdb"))
    found = [dataset[i] for i in range(len(dataset))]
    if expected is None:
        assert set(found) == source
    else:
        assert all(map(same, found, expected))
        assert len(found) == len(expected)


@pytest.mark.parametrize("source", ["text", b"bytes", {"a": 1}, 5, None])
def test_what_is_no_source_of_samples(tmp_path: Path, source: Any) -> None:
    with pytest.raises(TypeError, match="samples must be"):
        write_lmdb(source, tmp_path / "a.lmdb")
    assert not list(tmp_path.iterdir())


def test_a_reused_buffer_is_copied(tmp_path: Path) -> None:
    buffer = torch.zeros(3)

    def samples() -> Any:
        for i in range(4):
            buffer.fill_(i)
            yield buffer

    dataset = LMDBDataset(write_lmdb(samples(), tmp_path / "a.lmdb"))
    assert [dataset[i].tolist() for i in range(4)] == [[i] * 3 for i in range(4)]


def test_views_and_gradients_are_stored_as_plain_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    complex_base = torch.complex(base, base + 1)
    samples = [(base.t(), base[:, ::2].clone().requires_grad_(), complex_base.conj(), np.arange(9)[::-2])]
    found = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb"))[0]
    assert torch.equal(found[0], base.t())
    assert not found[1].requires_grad
    assert torch.equal(found[2], complex_base.conj().resolve_conj())
    assert found[3].tolist() == [8, 6, 4, 2, 0]


def test_what_is_read_is_owned_by_the_reader(tmp_path: Path) -> None:
    dataset = LMDBDataset(write_lmdb([(torch.zeros(4), np.zeros(4))] * 2, tmp_path / "a.lmdb"))
    tensor, array = dataset[0]
    tensor.add_(1)
    array += 1
    dataset.close()
    assert tensor.sum() == array.sum() == 4
    assert dataset[0][0].sum() == dataset[0][1].sum() == dataset[1][0].sum() == 0


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Point(1, 2), "namedtuple Point"),
        (object(), "object"),
        (OrderedDict(a=1), "plain dict"),
        ({(1, 2): 3}, "key"),
        ({True: 3}, "key"),
        (np.array([object()]), "objects"),
        (np.zeros(2, dtype=[("a", "i4")]), "records"),
        (np.ma.masked_array([1], [True]), "masked"),
        (torch.zeros(2).to_sparse(), "to_dense"),
        (torch.nn.Parameter(torch.zeros(2)), "as_subclass"),
        (torch.zeros(2, device="meta"), "Tensor"),
        ({1, 2}, "set"),
        (1 + 2j, "complex"),
    ],
)
def test_what_only_pickle_could_restore_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"Sample 0: The sample\['deep'\]\[1\]") as caught:
        write_lmdb([{"deep": [1, value]}], tmp_path / "a.lmdb")
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


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


def test_no_samples_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EmptyStoreError):
        write_lmdb([], tmp_path / "a.lmdb")
    assert not list(tmp_path.iterdir())


def test_index_errors_name_the_range(tmp_path: Path) -> None:
    dataset = LMDBDataset(write_lmdb([1, 2, 3], tmp_path / "a.lmdb"))
    assert [dataset[i] for i in (-3, -1, 0, 2)] == [1, 3, 1, 3]
    assert dataset[np.int64(1)] == dataset[torch.tensor(1)] == 2
    for index in (3, -4, 10**30):
        with pytest.raises(IndexError, match="0 to 2"):
            dataset[index]
        with pytest.raises(IndexError, match="0 to 2"):
            dataset.__getitems__([0, index])
    with pytest.raises(TypeError, match="Subset"):
        dataset[0:2]  # type: ignore[index]
    assert list(dataset) == [1, 2, 3]


def test_the_size_bar(tmp_path: Path) -> None:
    small = write_lmdb(torch.zeros(1500, 1024), tmp_path / "small.lmdb")
    assert small.stat().st_size <= 1.05 * 1500 * 4096
    large = write_lmdb(torch.zeros(500, 3072), tmp_path / "large.lmdb")
    assert large.stat().st_size <= 1.01 * 500 * 12288
    labelled = write_lmdb(((torch.zeros(1024), i) for i in range(1500)), tmp_path / "labelled.lmdb")
    assert labelled.stat().st_size <= 1.05 * 1500 * 4104
    tiny = write_lmdb(((float(i), i) for i in range(100_000)), tmp_path / "tiny.lmdb")
    assert tiny.stat().st_size <= 1.05 * 1_600_000
    for path in (small, large, labelled, tiny):  # no sparse file: what it seems to take is what it takes
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_the_same_samples_give_the_same_file(tmp_path: Path) -> None:
    first = write_lmdb(varied_samples(50), tmp_path / "a.lmdb", block_bytes=4096)
    second = write_lmdb(varied_samples(50), tmp_path / "b.lmdb", block_bytes=4096)
    assert first.read_bytes() == second.read_bytes()
