"""Batches gathered from a store, compared with samples that are read one by one and collated."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_speedkit.data import LMDBDataset, collate_samples, write_lmdb
from lightning_speedkit.data.loading.batch_builder import StoreBatches, builder_for
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.data.store.leaf_codec import _TENSOR_TYPES
from lightning_speedkit.data.store.lmdb_dataset import sample_rng
from lightning_speedkit.errors import LoaderError, StoreCorruptError
from tests.data.batches import KEY, built
from tests.data.samples import same, varied_samples

Make = Callable[[random.Random], Any]


def tensors(name: str, shape: tuple[int, ...]) -> Make:
    dtype = _TENSOR_TYPES[name]

    def make(chance: random.Random) -> torch.Tensor:
        data = bytearray(chance.randbytes(int(np.prod(shape)) * dtype.itemsize))
        if name == "bool":
            data = bytearray(byte & 1 for byte in data)
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

    return make


def arrays(dtype: str, shape: tuple[int, ...], *, scalar: bool = False) -> Make:
    def make(chance: random.Random) -> Any:
        data = bytearray(chance.randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize))
        if dtype == "|b1":
            data = bytearray(byte & 1 for byte in data)
        array = np.ndarray(shape, dtype, buffer=data if data else None)
        return array[()] if scalar else array

    return make


def plain(kind: str) -> Make:
    texts = ["", "a", "ä€😀", "\ud800", "long " * 50]
    return {
        "int": lambda chance: chance.choice([0, -1, 2**63 - 1, -(2**63), chance.randrange(10**6)]),
        "float": lambda chance: chance.choice([0.1, -0.0, 1e300, 1e-320, float("inf"), float("nan"), chance.random()]),
        "bool": lambda chance: chance.random() < 0.5,
        "str": lambda chance: chance.choice(texts),
        "bytes": lambda chance: chance.randbytes(chance.choice([0, 1, 7, 300])),
        "none": lambda chance: None,
    }[kind]


shapes = st.one_of(
    st.just(()), st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), st.just((6000,)), st.just((64, 33))
)
numpy_dtypes = ["|b1", "|u1", "|i1", "<u2", "<i2", ">i2", "<u4", "<i8", ">u8", "<f2", "<f4", ">f4", "<f8", "<c8",
                "<c16", "<M8[s]", "<U3", "|S2"]  # fmt: skip
leaves = st.one_of(
    st.builds(tensors, st.sampled_from(sorted(_TENSOR_TYPES)), shapes),
    st.builds(arrays, st.sampled_from(numpy_dtypes), shapes),
    st.builds(lambda dtype: arrays(dtype, (), scalar=True), st.sampled_from(numpy_dtypes[:-2])),
    st.builds(plain, st.sampled_from(["int", "float", "bool", "str", "bytes", "none"])),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.sampled_from("abc"), st.integers(0, 3)), inner, max_size=4),
    ),
    max_leaves=5,
)


def sample_of(schema: Any, chance: random.Random) -> Any:
    if callable(schema):
        return schema(chance)
    if isinstance(schema, dict):
        return {key: sample_of(value, chance) for key, value in schema.items()}
    return type(schema)(sample_of(value, chance) for value in schema)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    schema=schemas, count=st.integers(1, 12), seed=st.integers(0, 99), size=st.sampled_from([None, 1 << 20, 100]),
    data=st.data(),
)  # fmt: skip
def test_any_fields_as_collated_samples(
    tmp_path: Path, schema: Any, count: int, seed: int, size: int | None, data: st.DataObject
) -> None:
    chance = random.Random(seed)
    samples = [sample_of(schema, chance) for _ in range(count)]
    dataset = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096))
    wanted = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))
    expected = collate_samples([dataset[i] for i in wanted])
    assert same(built(builder_for(dataset, None), wanted, size), expected)
    assert same(built(SampleBatches(dataset, None), wanted, size), expected)


WAYS = {
    "one type": (lambda i: torch.full((5,), i), True),
    "all kinds of numbers": (lambda i: (i, i / 3, i > 2, torch.tensor(i), np.float32(i), np.arange(i, i + 3)), True),
    "texts of any length": (lambda i: {"text": "ä" * i, "raw": b"x" * (i % 3), "no": None, "x": torch.ones(3)}, True),
    "a store without bytes": (lambda i: (None, torch.zeros(0), ()), True),
    "an array of the other byte order": (lambda i: np.full(3, i, ">i4"), False),
    "texts in arrays": (lambda i: np.array(["a", "bc"]), False),
    "dates": (lambda i: np.datetime64(i, "s"), False),
    "varying shapes": (lambda i: (i, torch.zeros(i)), False),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_which_stores_are_gathered(tmp_path: Path, way: str) -> None:
    make, gathers = WAYS[way]
    dataset = LMDBDataset(write_lmdb(map(make, range(40)), tmp_path / "a.lmdb"))
    assert type(builder_for(dataset, None)) is (StoreBatches if gathers else SampleBatches)
    assert type(builder_for(dataset, collate_samples)) is type(builder_for(dataset, None))


class Own(LMDBDataset):
    """A subclass, which may do what it likes."""


def test_what_needs_samples_is_not_gathered(tmp_path: Path) -> None:
    path = write_lmdb([(i, i) for i in range(5)], tmp_path / "a.lmdb")
    assert type(builder_for(LMDBDataset(path, transform=tuple), None)) is SampleBatches
    assert type(builder_for(LMDBDataset(path), list)) is SampleBatches
    assert type(builder_for(Own(path), None)) is SampleBatches
    assert type(builder_for([1, 2], None)) is SampleBatches


@pytest.mark.parametrize("item", [1, 2, 3, 4, 6, 8, 12, 31, 64, 100, 2048, 3000, 9000])
@pytest.mark.parametrize("head", [0, 1, 3, 8])
def test_every_alignment(tmp_path: Path, item: int, head: int) -> None:
    """Samples of any size behind fields of any size, in blocks inside LMDB's pages and beyond."""

    def sample(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        chance = random.Random(i)
        return tuple(torch.frombuffer(bytearray(chance.randbytes(n)), dtype=torch.uint8) if n else torch.zeros(0)
                     for n in (head, item))  # type: ignore[return-value]  # fmt: skip

    count = max(3, 12_000 // item) if item < 9000 else 3
    count = min(count, 300)
    dataset = LMDBDataset(write_lmdb(map(sample, range(count)), tmp_path / "a.lmdb", block_bytes=4096))
    wanted = [*range(count), *range(count - 1, -1, -2), 0, 0]
    expected = collate_samples([sample(i) for i in wanted])
    builder = builder_for(dataset, None)
    assert isinstance(builder, StoreBatches)
    assert same(built(builder, wanted, 1 << 21), expected)


def test_samples_of_every_kind_that_vary(tmp_path: Path) -> None:
    samples = [{**sample, "image": torch.ones(3, 4), "boxes": 0} for sample in varied_samples(30)]
    dataset = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096))
    builder = builder_for(dataset, None)
    assert isinstance(builder, StoreBatches)
    wanted = [29, 0, 3, 3, 17]
    assert same(built(builder, wanted), collate_samples([samples[i] for i in wanted]))
    assert same(built(pickle.loads(pickle.dumps(builder)), wanted), collate_samples([samples[i] for i in wanted]))


def test_pictures_are_decoded_into_their_rows(tmp_path: Path) -> None:
    class Field:
        """Stands for an ImageField: the first bytes, and a random number."""

        shape = (2, 3, 4)
        random = True

        def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None) -> None:
            assert rng is not None
            if len(data) < 23:
                raise ValueError("too short")
            out[:] = np.frombuffer(data, np.uint8)[:24].reshape(2, 3, 4)
            out[0, 0, 0] = rng.integers(256)

    pictures = [bytes(range(i, i + 24)) for i in range(9)] + [b"short"]
    dataset = LMDBDataset(
        write_lmdb([(i, p) for i, p in enumerate(pictures)], tmp_path / "a.lmdb"), fields={1: Field()}
    )  # type: ignore[dict-item]
    builder = builder_for(dataset, None)
    assert isinstance(builder, StoreBatches)
    assert builder.decodes
    for size in (1 << 16, None):
        labels, images = built(builder, [4, 0, 7], size)
        assert labels.tolist() == [4, 0, 7]
        assert images.shape == (3, 4, 2, 3)
        assert images.is_contiguous(memory_format=torch.channels_last)
        for i, image in zip((4, 0, 7), images, strict=True):
            expected = np.frombuffer(pictures[i], np.uint8).reshape(2, 3, 4).copy()
            expected[0, 0, 0] = sample_rng(KEY[0], KEY[1], i, 1).integers(256)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
    with pytest.raises(LoaderError, match=r"Field \[1\] of sample 9 \(block 0 of .*a.lmdb\): too short") as caught:
        built(builder, [0, 9])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_lmdb(((torch.full((500,), i), i) for i in range(40)), tmp_path / "a.lmdb", block_bytes=8192)


def flip(path: Path, value: int) -> None:
    """Flip a bit in the middle of the sample that is filled with this value."""
    data = bytearray(path.read_bytes())
    place = data.find(np.full(500, value, "<i8").tobytes())
    assert place > 0
    data[place + 1000] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_block_is_found_when_it_is_read_first(store: Path) -> None:
    flip(store, 21)
    builder = builder_for(LMDBDataset(store), None)
    assert isinstance(builder, StoreBatches)
    bad = [i for i in range(40) if i // 2 == 21 // 2]
    good = [i for i in range(40) if i not in bad]
    assert built(builder, good)[1].tolist() == good
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match=rf"block 10 .*{bad[0]}.*{bad[-1]}"):
            built(builder, [0, *bad, 39])
    assert built(builder, good)[1].tolist() == good


def test_a_file_that_is_changed_in_place_is_noticed(store: Path) -> None:
    builder = builder_for(LMDBDataset(store), None)
    built(builder, [3])
    with store.open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    os.utime(store, ns=(1, 1))
    with pytest.raises(StoreCorruptError, match="changed in place"):
        built(builder, [3])


def test_another_store_at_the_path_is_refused(store: Path) -> None:
    dataset = LMDBDataset(store)
    builder = builder_for(dataset, None)
    sent = pickle.dumps(builder)
    write_lmdb([(torch.zeros(500), -i) for i in range(40)], store)
    assert built(builder, [5])[1].tolist() == [5]  # what is mapped stays
    for again in (lambda: pickle.loads(sent), lambda: builder_for(dataset, None)):
        with pytest.raises(StoreCorruptError, match="another store"):
            again()
