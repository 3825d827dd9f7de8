"""Shapes and sizes that vary, and samples around the size of a block."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from tests.data.samples import same, varied_samples


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
