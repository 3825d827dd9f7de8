"""The workers with their ring: what becomes of slots when batches are kept, let go, dropped or fail."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading.batch_builder import BatchTask, builder_for
from lightning_speedkit.data.loading.loader_crew import Crew, Pending
from lightning_speedkit.data.loading.worker_choice import WorkerChoice
from lightning_speedkit.errors import LoaderError


def task(number: int, samples: list[int]) -> BatchTask:
    return BatchTask(number, np.array(samples), (0, 0, 0, number))


def crew(dataset: Any, kind: str, *, batch_size: int = 2, collate: Any = None, places: bool = True) -> Crew:
    return Crew(
        builder_for(dataset, collate),
        WorkerChoice(kind, 1, "a test"),
        batch_size=batch_size,
        steps=100,
        prefetch_factor=2,
        pin_memory=False,
        places=places,
        start_method=None,
        ahead=None,
    )


class Rows:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 99:
            raise RuntimeError("the last one")
        return torch.full((3,), index)


@pytest.fixture(params=["inline", "threads", "processes"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["store", "python"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "python":
        return Rows()
    return LMDBDataset(write_lmdb((torch.full((3,), i) for i in range(100)), tmp_path / "a.lmdb"))


def test_more_batches_are_kept_than_there_are_slots(dataset: Any, kind: str) -> None:
    workers = crew(dataset, kind)
    kept = [workers.result(workers.submit(task(i, [2 * i, 2 * i + 1]))) for i in range(20)]
    assert [batch[:, 0].tolist() for batch in kept] == [[2 * i, 2 * i + 1] for i in range(20)]
    workers.close()
    assert [batch[:, 2].tolist() for batch in kept] == [[2 * i, 2 * i + 1] for i in range(20)]


def test_dropped_batches_give_their_slots_back(dataset: Any, kind: str) -> None:
    workers = crew(dataset, kind)
    workers.result(workers.submit(task(0, [0, 1])))  # the ring is there
    assert workers._ring is not None
    free = workers._ring.free
    pending: deque[Pending] = deque(workers.submit(task(i, [i])) for i in range(1, 4))
    assert workers._ring.free == free - 3
    workers.drain(pending)
    assert not pending
    assert workers._ring.free == free
    workers.close()


def test_a_batch_that_fails_gives_its_slot_back(kind: str) -> None:
    workers = crew(Rows(), kind)
    workers.result(workers.submit(task(0, [0])))
    assert workers._ring is not None
    free = workers._ring.free
    with pytest.raises(LoaderError, match="the last one"):
        workers.result(workers.submit(task(1, [99])))
    assert workers._ring.free == free
    assert workers.result(workers.submit(task(2, [5])))[0].tolist() == [5, 5, 5]
    workers.close()


def test_a_batch_larger_than_the_first_ones(kind: str) -> None:
    workers = crew(Rows(), kind, batch_size=50)
    assert workers.result(workers.submit(task(0, [7]))).shape == (1, 3)
    batch = workers.result(workers.submit(task(1, list(range(50)))))
    assert batch[:, 1].tolist() == list(range(50))
    workers.close()


def as_list(samples: Any) -> Any:
    return [sample.tolist() for sample in samples]


def test_a_collate_that_makes_no_tensors(kind: str) -> None:
    workers = crew(Rows(), kind, collate=as_list, places=False)
    assert workers.result(workers.submit(task(0, [3, 4]))) == [[3, 3, 3], [4, 4, 4]]
    workers.close()
