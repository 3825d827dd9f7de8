"""The dataset in threads, forks and DataLoader workers of every start method."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.errors import (
    StoreCorruptError,
    StoreNotFoundError,
)
from tests.data.samples import same, varied_samples

COUNT = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lmdb(((torch.full((500,), i), i) for i in range(COUNT)), tmp_path / "a.lmdb", block_bytes=8192)


def numbers(batches: Any) -> list[int]:
    found = []
    for tensors, labels in batches:
        assert tensors.shape == (len(labels), 500)
        assert torch.equal(tensors, labels[:, None].expand_as(tensors))
        found += labels.tolist()
    return found


def double_label(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return sample[0] * 2, sample[1] * 2


@pytest.mark.parametrize("opened_before", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_forked_workers(path: Path, opened_before: bool, persistent: bool) -> None:
    first, second = LMDBDataset(path), LMDBDataset(path)  # as of a train and a val split over one file
    if opened_before:
        assert first[3][1] == second[3][1] == 3
    loaders = [
        DataLoader(d, batch_size=7, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
        for d in (first, second)
    ]
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            assert torch.equal(batches[0][0], batches[1][0])
        assert numbers(loaders[0]) == list(range(COUNT))
    assert first[5][1] == 5  # the parent's own is as it was


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_spawned_workers(path: Path, method: str) -> None:
    dataset = LMDBDataset(path, transform=double_label)
    assert dataset[3][1] == 6
    loader = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context=method, persistent_workers=True)
    for _ in range(2):
        assert numbers(loader) == list(range(0, 2 * COUNT, 2))


def test_pickle_and_copy_hold_no_handle(path: Path) -> None:
    dataset = LMDBDataset(path, transform=double_label)
    dataset[0]
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset), copy.deepcopy(dataset)):
        assert other[7][1] == 14
        assert len(other) == COUNT
        other.close()
    assert dataset[7][1] == 14
    assert len(pickle.dumps(dataset)) < 1000


def test_a_relative_path_survives_a_change_of_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    dataset = LMDBDataset(path.name)
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(dataset))[3][1] == dataset[3][1] == 3


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    samples = varied_samples(100)
    dataset = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert all(pool.map(lambda i: same(dataset[i % 100], samples[i % 100]), range(400)))
            assert dataset._store is not None
            assert dataset._store.users == 1  # however many threads came first
            dataset.close()


def test_a_read_only_folder(path: Path) -> None:
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert numbers(DataLoader(LMDBDataset(path), batch_size=8, num_workers=1)) == list(range(COUNT))
        assert [file.name for file in path.parent.iterdir()] == ["a.lmdb"]
    finally:
        path.parent.chmod(0o755)


def test_a_store_written_anew_is_not_mixed_with_the_old_one(path: Path) -> None:
    held, unopened = LMDBDataset(path), LMDBDataset(path)
    assert held[0][1] == 0
    write_lmdb(((torch.zeros(500), -i) for i in range(COUNT)), path, block_bytes=8192)
    assert held[9][1] == 9  # what is open stays open
    with pytest.raises(StoreCorruptError, match="written again after this dataset was made"):
        unopened[0]
    assert LMDBDataset(path)[9][1] == -9
    assert held[10][1] == 10


def test_a_store_that_vanishes(path: Path) -> None:
    dataset = LMDBDataset(path)
    path.unlink()
    with pytest.raises(StoreNotFoundError):
        dataset[0]


def test_subset_and_transform(path: Path) -> None:
    dataset = LMDBDataset(path, transform=double_label)
    assert numbers(DataLoader(Subset(dataset, [4, 2, -1]), batch_size=2)) == [8, 4, 2 * (COUNT - 1)]
    with pytest.raises(TypeError, match="transform must be callable"):
        LMDBDataset(path, transform="flip")  # type: ignore[arg-type]


def test_random_state_is_left_alone(path: Path) -> None:
    before = torch.get_rng_state()
    LMDBDataset(path)[0]
    assert torch.equal(torch.get_rng_state(), before)


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
