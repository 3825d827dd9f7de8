"""Samples that a dataset makes: what is random in them, what they become, and faults that say where."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.errors import LoaderError, StoreCorruptError
from tests.data.batches import built, states, task_of
from tests.data.samples import same


class Drawn:
    """A dataset whose samples are random numbers of all three kinds."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        return random.random(), torch.tensor(np.random.rand(2)), torch.rand(2)


@pytest.mark.parametrize("dataset", [Drawn(), list(range(100))], ids=["draws", "does not draw"])
def test_the_random_state_of_a_batch_and_after_it(dataset: Any) -> None:
    builder = SampleBatches(dataset, None)
    before = states()
    first = built(builder, [4, 5], randomness="put back")
    assert states() == before
    torch.rand(3), random.random(), np.random.rand()
    second = built(builder, [4, 5], randomness="put back")
    assert same(first, second)
    assert same(built(builder, [4, 5], randomness="set"), first)
    assert states() != before
    for key in ((3, 0, 0, 1), (3, 0, 1, 0), (3, 1, 0, 0), (4, 0, 0, 0)):
        other, _ = builder.build(task_of([4, 5], key), None, "put back")
        assert same(other, first) == isinstance(dataset, list)
    now = states()
    built(builder, [4, 5], randomness="untouched")
    assert (states() == now) == isinstance(dataset, list)


def test_the_random_state_is_put_back_after_an_error() -> None:
    def fail(_: Any) -> Any:
        torch.rand(1), random.random(), np.random.rand()
        raise OSError("no")

    before = states()
    with pytest.raises(LoaderError):
        built(SampleBatches(Drawn(), fail), [1], randomness="put back")
    assert states() == before


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error
        return index


def divide(sample: Any) -> float:
    return 1 / (sample[1] - 33)


def test_an_error_of_a_sample_names_it(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"Sample 7 \(Failing\): OSError: gone(.|\n)*in __getitem__") as caught:
        built(SampleBatches(Failing(OSError("gone")), None), [1, 7])
    assert isinstance(caught.value.__cause__, OSError)
    path = write_lmdb(((torch.full((500,), i), i) for i in range(40)), tmp_path / "a.lmdb", block_bytes=8192)
    with pytest.raises(LoaderError, match=r"Sample 33 \(block 16 of .*a.lmdb\): ZeroDivisionError(.|\n)*in divide"):
        built(SampleBatches(LMDBDataset(path, transform=divide), None), [0, 33])
    own = StoreCorruptError("as it is")
    with pytest.raises(StoreCorruptError, match=r"^as it is$"):
        built(SampleBatches(Failing(own), None), [7])
    for stop in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(stop)):
            built(SampleBatches(Failing(stop), None), [7])


def test_an_error_of_collate_names_the_samples() -> None:
    with pytest.raises(
        LoaderError, match=r"collate failed for the samples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(9\): IndexErr"
    ):
        built(SampleBatches(range(9), lambda samples: samples[9]), range(9))
    with pytest.raises(LoaderError, match=r"samples 1, 0: ValueError: Field sample has the shapes"):
        built(SampleBatches([torch.zeros(1), torch.zeros(2)], None), [1, 0])


class AtOnce:
    """Gives a whole batch at once."""

    def __init__(self, give: Callable[[list[int]], Any]) -> None:
        self.__getitems__ = give

    def __len__(self) -> int:
        return 10


def test_samples_that_a_dataset_gives_at_once() -> None:
    asked: list[Any] = []

    def give(indices: list[int]) -> list[int]:
        asked.append(indices)
        return [10 * i for i in indices]

    assert built(SampleBatches(AtOnce(give), None), [3, 1]).tolist() == [30, 10]
    assert asked == [[3, 1]]
    assert {type(i) for i in asked[0]} == {int}
    with pytest.raises(LoaderError, match=r"AtOnce.__getitems__ gave 1 samples for 2 indices"):
        built(SampleBatches(AtOnce(lambda indices: [1]), None), [3, 1])
    with pytest.raises(LoaderError, match=r"AtOnce.__getitems__ failed for the samples 3, 1: KeyError: 'x'"):
        built(SampleBatches(AtOnce(lambda indices: {}["x"]), None), [3, 1])


@pytest.mark.parametrize("size", [None, 40, 1 << 16])
def test_a_batch_of_the_users_own_making(size: int | None) -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(samples), "ids": [str(s) for s in samples], "pair": (torch.ones(2, 2).t(), 5)}

    found = built(SampleBatches(range(10), collate), [2, 4], size)
    assert same(found, collate([2, 4]))


def test_dataset_indices_are_plain_integers() -> None:
    class Strict:
        def __getitem__(self, index: Any) -> int:
            assert type(index) is int
            return index

    assert built(SampleBatches(Strict(), None), [5, 6]).tolist() == [5, 6]
