"""Two ranks agree, on numbers and on a batch size, and hear of one that is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_ranks import FAILED, FITS, NO_ROOM, Ranks
from tests.memory.scarce import Net, dataset, fit
from tests.two_ranks import on_two_ranks


class _OfRank(Net):
    """The first rank has room for everything."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.where = "none" if self.global_rank == 0 else "backward"
        return super().training_step(batch, batch_idx)


def _searched() -> Any:
    told = []
    search: BatchSizeSearch | None = None
    for size, search in ((7, None), (4, BatchSizeSearch(start=5, limit=8, steps=2))):
        loaders = DataLoader(dataset(), size, shuffle=True), DataLoader(dataset(20), 5)
        state, run = fit(search, _OfRank(7), loaders, strategy="ddp", devices=2, max_epochs=1)
        assert run.world_size == 2
        told.append((state["weights"], state["losses"]))
    assert search is not None
    return told, search.batch_size, search.trials


def _on_a_rank() -> Any:
    searched = _searched()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    ranks = Ranks(2)
    largest = ranks.largest([float(rank), -float(rank), 1e300])
    if rank == 0:  # the other one ends
        with pytest.raises(RuntimeError, match="Another rank ended while batch sizes were tried"):
            ranks.largest([FITS])
    return searched, largest


def test_two_ranks_agree_though_one_has_no_room_and_hear_of_one_that_is_gone() -> None:
    ((first, size, trials), largest), ((second, other, others), same) = on_two_ranks(_on_a_rank)
    assert size == other == 7
    assert trials == others
    assert [(trial.size, trial.fits) for trial in trials] == [(5, True), (8, False), (6, True), (7, True)]
    for plain, searched in (first, second):
        torch.testing.assert_close(searched, plain, rtol=0, atol=0)
    assert largest == same == [1.0, 0.0, 1e300]


def test_alone_nothing_is_exchanged() -> None:
    ranks = Ranks(1)
    assert ranks.largest([FITS, NO_ROOM, FAILED]) == [0.0, 1.0, 2.0]
    ranks.close()
    ranks.close()
    assert not torch.distributed.is_initialized()
