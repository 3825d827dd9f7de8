"""The dataset in threads, forks and DataLoader workers of every start method."""

from __future__ import annotations

import copy
import os
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
from tests.data.forked import end_of_fork
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
    with pytest.raises(StoreCorruptError, match="another store than this dataset was made for"):
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


class Scaled(LMDBDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 100


class ScaledTwice(Scaled):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [10 * item for item in super().__getitems__(indices)]


def test_what_a_subclass_overrides_counts_in_a_loader_too(tmp_path: Path) -> None:
    path = write_lmdb(range(6), tmp_path / "a.lmdb")
    for workers in (0, 1):
        batch = next(iter(DataLoader(Scaled(path), batch_size=3, num_workers=workers)))
        assert batch.tolist() == [0, 100, 200]
    assert Scaled(path).__getitems__([2, -1]) == [200, 500]
    assert ScaledTwice(path).__getitems__([1, 2]) == [1000, 2000]


def _overwrite(path: Path, content: bytes) -> None:
    """Write into the file that is there, as ``cp`` does; and make sure that the clock of the file has moved on."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("length", ["same", "shorter", "longer"])
def test_a_store_that_is_overwritten_in_place_is_not_read_on(path: Path, length: str) -> None:
    counts = {"same": COUNT, "shorter": COUNT // 2, "longer": 2 * COUNT}
    numbered = ((torch.full((500,), -i), -i) for i in range(counts[length]))
    other = write_lmdb(numbered, path.with_name("other.lmdb"), block_bytes=8192)
    dataset, unopened = LMDBDataset(path), LMDBDataset(path)
    assert dataset[1][1] == 1
    _overwrite(path, other.read_bytes())
    for read in (
        lambda: dataset[1],
        lambda: dataset.__getitems__([20]),
        lambda: unopened[0],
        lambda: LMDBDataset(path)[0],
    ):
        with pytest.raises(StoreCorruptError, match="was changed in place while it was open"):
            read()
    dataset.close()
    assert LMDBDataset(path)[1][1] == -1  # closed by all, it can be opened as what it is now
    with pytest.raises(StoreCorruptError, match="another store than this dataset was made for"):
        dataset[1]


def _read_a_truncated_store(folder: str) -> None:
    path = write_lmdb([bytes(100_000)] * 30, Path(folder, "a.lmdb"))
    dataset = LMDBDataset(path)
    dataset[0]
    os.truncate(path, 20_000)
    with pytest.raises(StoreCorruptError, match="changed in place"):
        dataset[29]


def test_a_store_that_is_cut_while_it_is_open_does_not_end_the_process(tmp_path: Path) -> None:
    assert end_of_fork(lambda: _read_a_truncated_store(str(tmp_path))) == "returned"


class Half:
    """What a loader asks of a field that decodes: here the bytes of a 1 x 2 grey picture, with noise if random."""

    shape = (1, 2, 1)

    def __init__(self, random: bool = False) -> None:
        self.random = random

    def decode_into(self, data: Any, out: np.ndarray, rng: np.random.Generator | None) -> None:
        out[0, :, 0] = np.frombuffer(data, np.uint8) + (0 if rng is None else rng.integers(100))

    def __call__(self, data: bytes, rng: np.random.Generator | None = None) -> torch.Tensor:
        out = np.empty(self.shape, np.uint8)
        self.decode_into(data, out, rng)
        return torch.from_numpy(out).permute(2, 0, 1)


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    samples = [{"picture": bytes([i, i + 1]), "pair": (i, bytes([9, i]))} for i in range(6)]
    return write_lmdb(samples, tmp_path / "encoded.lmdb")


@pytest.mark.parametrize("key", ["picture", "['picture']"])
def test_a_field_is_decoded_where_it_stands(encoded: Path, key: str) -> None:
    dataset = LMDBDataset(encoded, fields={key: Half()})  # type: ignore[dict-item]
    for sample in (dataset[4], dataset.__getitems__([4])[0], pickle.loads(pickle.dumps(dataset))[4]):
        assert sample["picture"].tolist() == [[[4, 5]]]
        assert sample["pair"] == (4, bytes([9, 4]))


def test_a_field_deep_in_a_sample_comes_before_the_transform(encoded: Path) -> None:
    fields: Any = {"['pair'][1]": Half()}
    dataset = LMDBDataset(encoded, lambda sample: sample["pair"][1].sum().item(), fields)
    assert [dataset[i] for i in range(6)] == [9 + i for i in range(6)]


def test_a_random_field_draws_from_the_seed_or_from_torchs_state(encoded: Path) -> None:
    dataset = LMDBDataset(encoded, fields={"picture": Half(random=True)})  # type: ignore[dict-item]

    def drawn(seed: Any = None) -> list[int]:
        return [int(dataset.sample(i, seed=seed)["picture"][0, 0, 0]) - i for i in range(6)]

    first = drawn((1, 2))
    assert drawn((1, 2)) == first != drawn((1, 3))
    assert len(set(first)) > 1  # each sample its own
    torch.manual_seed(3)
    free = drawn()
    assert drawn() != free
    torch.manual_seed(3)
    assert drawn() == free


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        (
            {"image": Half()},
            ValueError,
            r"has no field 'image'. Fields of encoded bytes: \['picture'\], \['pair'\]\[1\]",
        ),
        ({"['pair'][0]": Half()}, TypeError, r"holds int, not the encoded bytes of a picture"),
        ({"picture": 64}, TypeError, r"fields\['picture'\] must be an ImageField, such as ImageField\(224\), got 64"),
    ],
)
def test_fields_that_are_wrong_are_refused_at_once(
    encoded: Path, fields: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LMDBDataset(encoded, fields=fields)
