"""A worker at the other end of a pipe, and what becomes of its exceptions on their way."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading.batch_layout import restore
from lightning_speedkit.data.loading.ring import Ring, SharedMemory
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.data.loading.worker_process import BEGUN, Failure, index_area, work
from lightning_speedkit.errors import LoaderError, SpeedkitError, StoreCorruptError


class Rows:
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise StoreCorruptError("block 9 is damaged")
        return torch.full((3,), index)


def test_it_answers_each_task_and_ends_when_the_other_end_is_closed() -> None:
    shared = SharedMemory(Ring.shared_bytes(2, 256))
    ring = Ring(2, 256, shared=shared)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(theirs, SampleBatches(Rows(), None), shared, 2, 256, [ours]))
    worker.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == BEGUN
    answers = []
    for number, samples in ((5, [1, 2]), (6, [9])):
        index_area(ring.memory(1), len(samples))[:] = samples
        ours.send((number, (0, 0, 0, number), len(samples), 1))
        assert ours.poll(60)
        answers.append(ours.recv())
    ours.close()
    worker.join(60)
    assert worker.exitcode == 0
    worker.close()
    (first, tree), (second, failure) = answers
    assert (first, second) == (5, 6)
    placed, wanted = pickle.loads(tree)
    assert wanted == 64  # 48 bytes, up to the next multiple of 64
    assert restore(placed, ring.memory(1), ring).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert str(failure.error()) == "block 9 is damaged"


def test_the_numbers_of_samples_are_at_the_end_of_a_slot() -> None:
    memory = np.zeros(40, dtype=np.uint8)
    index_area(memory, 2)[:] = [1, 258]
    assert memory.tolist() == [0] * 24 + [1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]


class TwoArguments(SpeedkitError):
    """Pickles, and cannot be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (StoreCorruptError("as it is"), StoreCorruptError, r"^as it is$"),
        (TwoArguments("one", "two"), LoaderError, r"^A worker of the loader failed:\none and two$"),
        (KeyError("x"), LoaderError, r"^A worker of the loader failed:\nKeyError: 'x'\n$"),
        (SystemExit(3), LoaderError, r"SystemExit: 3"),
    ],
)
def test_what_becomes_of_an_exception(error: BaseException, kind: type[Exception], words: str) -> None:
    arrived: Any = pickle.loads(pickle.dumps(Failure(error))).error()
    assert type(arrived) is kind
    with pytest.raises(kind, match=words):
        raise arrived
