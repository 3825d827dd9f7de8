"""Ranks that wait for the first one, longer than the collectives of the training would."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from lightning_speedkit.compress.rank_wait import RankWait
from tests.two_ranks import on_two_ranks

PATIENCE = 1.0  # seconds, of the group of the training


def _trainer(world_size: int) -> Any:
    strategy = SimpleNamespace(broadcast=lambda value: ("of the strategy", value))
    return SimpleNamespace(world_size=world_size, strategy=strategy)


def test_one_process_asks_its_strategy() -> None:
    wait = RankWait(_trainer(1))
    assert wait.from_first(3) == ("of the strategy", 3)
    wait.close()


def _late_first_rank() -> tuple[Any, bool]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    rank = distributed.get_rank()
    wait = RankWait(_trainer(2))
    if rank == 0:
        time.sleep(2.5 * PATIENCE)
    value = wait.from_first({"from": rank})
    wait.close()
    wait.close()  # nothing more to leave
    other = RankWait(_trainer(2))
    distributed.destroy_process_group()
    other.close()  # the strategy may have been torn down before
    return value, distributed.is_initialized()


def test_all_ranks_get_what_a_late_first_one_says() -> None:
    assert on_two_ranks(_late_first_rank) == [({"from": 0}, False)] * 2


def _late_for_the_training() -> str:
    distributed = torch.distributed
    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    if distributed.get_rank() == 0:
        time.sleep(2.5 * PATIENCE)
        return "late"
    try:
        distributed.broadcast_object_list([None], src=0)
    except RuntimeError:
        return "gave up"
    return "got it"


def test_the_group_of_the_training_would_have_given_up() -> None:
    assert on_two_ranks(_late_for_the_training) == ["late", "gave up"]
