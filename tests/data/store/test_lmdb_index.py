"""Computed places, compared with blocks that are filled one sample after the other."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_speedkit.data.store.index_builder import IndexBuilder
from lightning_speedkit.data.store.lmdb_index import StoreIndex, alignment_for
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.errors import StoreCorruptError, StoreVersionError


def fill(sizes: list[int], block_bytes: int, alignment: int) -> list[tuple[int, int]]:
    """The rule of the format in its simplest form: a sample goes behind the last one if it fits into the block."""
    places: list[tuple[int, int]] = []
    block, end = -1, block_bytes + 1
    for size in sizes:
        start = (end + alignment - 1) // alignment * alignment
        if start + size > block_bytes:
            block, start = block + 1, 0
        places.append((block, start))
        end = start + max(size, 1)
    return places


@settings(deadline=None, max_examples=150)
@given(
    st.one_of(
        st.lists(st.integers(0, 5000), min_size=1, max_size=60),
        st.builds(lambda size, count, tail: [size] * count + tail, st.integers(0, 5000), st.integers(1, 80),
                  st.lists(st.integers(0, 300), max_size=4)),
    )
)  # fmt: skip
def test_places_are_those_of_filling_blocks_in_turn(sizes: list[int]) -> None:
    builder = IndexBuilder(Schema.of(b""), sizes[0], 4096)
    placed = []
    for size in sizes:
        placed.append(builder.place(size))
        builder.add(size, ((size,),))
    expected = fill(sizes, 4096, alignment_for(sizes[0]))
    assert placed == expected
    index = StoreIndex.of(*builder.finish(4096))
    index.check()
    assert [index.place(i) for i in range(len(sizes))] == expected
    assert [index.size(index.shapes(i)) for i in range(len(sizes))] == sizes
    for block in range(index.blocks):
        assert list(index.samples_of(block)) == [i for i, place in enumerate(expected) if place[0] == block]
    assert index.meta["payload_bytes"] == sum(sizes)
    numbers = np.array([*range(len(sizes)), *range(len(sizes) - 1, -1, -2)], dtype=np.int64)
    blocks, starts = index.places(numbers)
    assert (blocks.dtype, starts.dtype) == (np.int64, np.int64)
    assert list(zip(blocks.tolist(), starts.tolist(), strict=True)) == [expected[i] for i in numbers]
    assert index.sizes(0, numbers, 1).tolist() == [sizes[i] for i in numbers]
    assert index.shape_of_all(0) == ((sizes[0],) if len(set(sizes)) == 1 else None)
    firsts = index.block_firsts()
    assert firsts.dtype == np.int64
    assert firsts.tolist() == [[place[0] for place in expected].index(block) for block in range(index.blocks)]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.tuples(st.integers(0, 3), st.integers(0, 3))),
        min_size=1, max_size=20,
    ),
    st.integers(1, 16),
)  # fmt: skip
def test_sizes_of_fields_of_any_rank(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]], item_bytes: int) -> None:
    schema = Schema.of((torch.zeros(1, dtype=torch.uint8), 5, torch.zeros(1, dtype=torch.uint8)))
    size = [math.prod(first) + 8 + math.prod(second) for first, second in shapes]
    builder = IndexBuilder(schema, size[0], 4096)
    for one, (first, second) in zip(size, shapes, strict=True):
        builder.add(one, (first, (), second))
    index = StoreIndex.of(*builder.finish(4096))
    numbers = np.arange(len(shapes))[::-1]
    for leaf, column in enumerate(
        ([first for first, _ in shapes], [()] * len(shapes), [second for _, second in shapes])
    ):
        found = index.sizes(leaf, numbers, item_bytes)
        assert found.dtype == np.int64
        assert found.tolist() == [item_bytes * math.prod(shape) for shape in column[::-1]]
        assert index.shape_of_all(leaf) == (column[0] if len(set(column)) == 1 else None)
    assert [index.shapes(i) for i in range(len(shapes))] == [(first, (), second) for first, second in shapes]


@pytest.mark.parametrize(
    ("size", "alignment"), [(0, 1), (31, 1), (63, 1), (64, 2), (2047, 32), (2048, 64), (10**9, 64)]
)
def test_padding_stays_near_three_percent(size: int, alignment: int) -> None:
    assert alignment_for(size) == alignment
    assert alignment == 1 or alignment / size <= 1 / 32


def test_records_that_do_not_fit_are_refused() -> None:
    builder = IndexBuilder(Schema.of(b""), 1, 4096)
    for size in (1, 2, 3):
        builder.add(size, ((size,),))
    meta, index = builder.finish(4096)
    fewer = json.loads(meta) | {"samples": 2}
    with pytest.raises(StoreCorruptError, match="has 3 rows instead of 2"):
        StoreIndex.of(json.dumps(fewer).encode(), index).check()
    newer = json.loads(meta) | {"format_version": 2}
    with pytest.raises(StoreVersionError, match="format 2"):
        StoreIndex.of(json.dumps(newer).encode(), index)
