"""What can be packed, and how large the file is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.errors import EmptyStoreError
from tests.data.samples import same, varied_samples


class NumberedDataset(torch.utils.data.Dataset[Any]):
    """Map-style, and without the IndexError that would end an iteration over it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * 10


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NumberedDataset(), [0, 10, 20]),
        ((i for i in range(3)), [0, 1, 2]),
        (torch.arange(3.0), [torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)]),
        (np.arange(4).reshape(2, 2), [np.array([0, 1]), np.array([2, 3])]),
        ({"a", "b"}, None),
        (DataLoader(Streamed(), batch_size=None), [0, 1, 2]),  # which has a __len__ that raises
        (DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=list), [[1, 2], [3, 4]]),
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


def test_arguments_in_the_wrong_order_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "a.lmdb", str(tmp_path / "a.lmdb")):
        with pytest.raises(TypeError, match=r"The samples come first: write_lmdb\(samples, path\), got .*a.lmdb"):
            write_lmdb(path, [1, 2])  # type: ignore[arg-type]


def test_a_reused_buffer_is_copied(tmp_path: Path) -> None:
    buffer = torch.zeros(3)

    def samples() -> Any:
        for i in range(4):
            buffer.fill_(i)
            yield buffer

    dataset = LMDBDataset(write_lmdb(samples(), tmp_path / "a.lmdb"))
    assert [dataset[i].tolist() for i in range(4)] == [[i] * 3 for i in range(4)]


def test_no_samples_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EmptyStoreError):
        write_lmdb([], tmp_path / "a.lmdb")
    assert not list(tmp_path.iterdir())


def test_the_size_bar(tmp_path: Path) -> None:
    small = write_lmdb(torch.zeros(1500, 1024), tmp_path / "small.lmdb")
    assert small.stat().st_size <= 1.05 * 1500 * 4096
    large = write_lmdb(torch.zeros(500, 3072), tmp_path / "large.lmdb")
    assert large.stat().st_size <= 1.01 * 500 * 12288
    labelled = write_lmdb(((torch.zeros(1024), i) for i in range(1500)), tmp_path / "labelled.lmdb")
    assert labelled.stat().st_size <= 1.05 * 1500 * 4104
    tiny = write_lmdb(((float(i), i) for i in range(40_000)), tmp_path / "tiny.lmdb")
    assert tiny.stat().st_size <= 1.05 * 640_000
    for path in (small, large, labelled, tiny):  # no sparse file: what it seems to take is what it takes
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_the_same_samples_give_the_same_file(tmp_path: Path) -> None:
    first = write_lmdb(varied_samples(50), tmp_path / "a.lmdb", block_bytes=4096)
    second = write_lmdb(varied_samples(50), tmp_path / "b.lmdb", block_bytes=4096)
    assert first.read_bytes() == second.read_bytes()
