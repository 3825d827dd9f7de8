"""When a store is shuffled in full and when by blocks."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading import shuffle_choice
from lightning_speedkit.data.loading.shuffle_choice import choose_shuffle, is_store


@pytest.fixture
def dataset(tmp_path: Path) -> LMDBDataset:
    """40 blocks of 4096 bytes, each with 4 samples of 1000 bytes."""
    return LMDBDataset(write_lmdb((bytes([i]) * 1000 for i in range(160)), tmp_path / "a.lmdb", block_bytes=4096))


def memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shuffle_choice, "read_hardware", lambda accelerator: SimpleNamespace(memory_bytes=size))


def test_a_store_of_half_the_memory_is_still_shuffled_in_full(
    dataset: LMDBDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = dataset.path.stat().st_size
    memory(monkeypatch, 2 * size)
    with caplog.at_level(logging.INFO, shuffle_choice.__name__):
        assert choose_shuffle(dataset, True) == ("full", True, {})
    assert "a.lmdb" in caplog.text
    assert "shuffled in full" in caplog.text


def test_a_larger_one_is_shuffled_by_blocks_in_windows_of_one_size_on_every_machine(
    dataset: LMDBDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = dataset.path.stat().st_size
    monkeypatch.setattr(shuffle_choice, "_WINDOW_BYTES", size // 10)
    memory(monkeypatch, 2 * size - 2)
    with caplog.at_level(logging.INFO, shuffle_choice.__name__):
        kind, fits, extra = choose_shuffle(dataset, True)
    assert (kind, fits) == ("blocks", False)
    assert extra["block_firsts"].tolist() == list(range(0, 160, 4))
    assert extra["window_blocks"] == 3  # a tenth of 40 blocks is 4, but size // 10 is rounded down
    memory(monkeypatch, size // 3)
    assert choose_shuffle(dataset, True)[2]["window_blocks"] == 3
    assert "shuffled by blocks" in caplog.text
    assert choose_shuffle(dataset, "full") == ("full", False, {})
    assert choose_shuffle(dataset, False) == ("none", False, {})


def test_too_many_samples_for_one_permutation_are_shuffled_by_blocks(
    dataset: LMDBDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle_choice, "_LARGEST_PERMUTATION", 160)
    assert choose_shuffle(dataset, True)[0] == "full"
    monkeypatch.setattr(shuffle_choice, "_LARGEST_PERMUTATION", 159)
    assert choose_shuffle(dataset, True)[:2] == ("blocks", True)


def test_only_stores_have_blocks() -> None:
    assert choose_shuffle([1], "full") == ("full", True, {})
    with pytest.raises(ValueError, match="shuffle='blocks' needs an LMDBDataset, got a list"):
        choose_shuffle([1], "blocks")


class Half(LMDBDataset):
    def __len__(self) -> int:
        return super().__len__() // 2


class Own(LMDBDataset):
    """A subclass with the length of its store."""


def test_a_length_of_its_own_is_no_store(dataset: LMDBDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the store would not be those of its samples."""
    memory(monkeypatch, 1)
    half = Half(dataset.path)
    assert [is_store(one) for one in (dataset, Own(dataset.path), half, [1])] == [True, True, False, False]
    assert choose_shuffle(half, True) == ("full", True, {})
    assert choose_shuffle(Own(dataset.path), True)[0] == "blocks"
    with pytest.raises(ValueError, match="needs an LMDBDataset, got a Half with a length of its own; use 'full'"):
        choose_shuffle(half, "blocks")
