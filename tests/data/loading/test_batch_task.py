"""The random state of a batch, and its samples in words."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading.batch_task import listed, seeded
from tests.data.batches import states


def test_numbers_of_one_batch_do_not_depend_on_each_other() -> None:
    """The three generators and neighbouring batches begin at unrelated places."""
    found = []
    for number in range(200):
        with seeded((0, 0, 0, number), put_back=True):
            found.append([random.random(), np.random.rand(), float(torch.rand(()))])
    table = np.array(found)
    assert len(np.unique(table)) == 600
    assert np.abs(np.corrcoef(table.T)[np.triu_indices(3, 1)]).max() < 0.3
    assert np.abs(table.mean(0) - 0.5).max() < 0.1


@pytest.mark.parametrize("put_back", [True, False])
def test_the_state_before_comes_back_only_if_asked(put_back: bool) -> None:
    before = states()
    found: list[tuple[float, ...]] = []

    def draw_and_fail() -> None:
        with seeded((1, 2), put_back=put_back):
            found.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            draw_and_fail()
        assert (states() == before) == put_back
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("count", "words"), [(1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ... (9)")]
)
def test_samples_in_words(count: int, words: str) -> None:
    assert listed(np.arange(count)) == words
