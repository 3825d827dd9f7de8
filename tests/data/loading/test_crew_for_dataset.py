"""The crew that a dataset gets: its size, who works, what is read ahead, and until when it is of use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading.crew_for_dataset import crew_for_dataset, is_of_use
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.epoch_tasks import EpochTasks
from lightning_speedkit.data.loading.loader_crew import Crew
from lightning_speedkit.data.loading.read_ahead import ReadAhead

SAMPLES = 20


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LMDBDataset]:
    dataset = LMDBDataset(write_lmdb((torch.full((3,), i) for i in range(SAMPLES)), tmp_path / "a.lmdb"))
    yield dataset
    dataset.close()


def made(dataset: Any, workers: str = "inline", collate: Any = None, **order: Any) -> tuple[Crew, EpochTasks]:
    tasks = EpochTasks(EpochOrder(**{"samples": SAMPLES, "batch_size": 4, **order}), 0, 0, 0)
    crew = crew_for_dataset(
        dataset,
        collate,
        tasks,
        workers=workers,
        num_workers=None if workers == "inline" else 2,
        prefetch_factor=2,
        pin_memory=False,
        start_method=None,
        fits=True,
    )
    return crew, tasks


@pytest.mark.parametrize("workers", ["inline", "threads", "processes"])
def test_it_makes_the_batches_of_the_tasks(store: LMDBDataset, workers: str) -> None:
    for dataset in (store, Rows()):
        crew, tasks = made(dataset, workers)
        assert crew.choice.kind == workers
        assert crew.depth == (1 if workers == "inline" else 4)
        batch = crew.result(crew.submit(tasks.task(1)))
        assert batch[:, 0].tolist() == [4, 5, 6, 7]
        crew.close()


def test_the_callers_collate_is_used() -> None:
    crew, tasks = made(Rows(), collate=lambda samples: [int(sample[0]) for sample in samples])
    assert crew.result(crew.submit(tasks.task(4))) == [16, 17, 18, 19]
    crew.close()


def test_a_store_is_read_ahead_and_other_datasets_are_not(store: LMDBDataset) -> None:
    for dataset, kind in ((store, ReadAhead), (Rows(), type(None))):
        crew, _ = made(dataset)
        assert type(crew._ahead) is kind
        crew.close()


def test_it_is_of_use_until_the_transform_is_another(store: LMDBDataset) -> None:
    crew, _ = made(store)
    assert is_of_use(crew, store)
    store.transform = torch.neg
    assert not is_of_use(crew, store)
    crew.close()


def test_it_is_of_no_use_when_all_its_processes_are_gone() -> None:
    rows = Rows()
    crew, _ = made(rows, "processes")
    assert is_of_use(crew, rows)
    crew.close()
    assert not is_of_use(crew, rows)
