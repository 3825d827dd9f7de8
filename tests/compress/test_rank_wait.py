"""Ranks that wait for the first one, as long as the patience lasts."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from lightning_speedkit.compress import rank_wait
from lightning_speedkit.compress.rank_wait import RankWait
from tests.two_ranks import on_two_ranks


def _trainer(world_size: int) -> Any:
    strategy = SimpleNamespace(broadcast=lambda value: ("of the strategy", value))
    return SimpleNamespace(world_size=world_size, strategy=strategy)


def test_one_process_asks_its_strategy() -> None:
    wait = RankWait(_trainer(1))
    assert wait.from_first(3) == ("of the strategy", 3)
    wait.close()


def _ask_the_first() -> tuple[Any, bool]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    wait = RankWait(_trainer(2))
    value = wait.from_first({"from": distributed.get_rank()})
    wait.close()
    wait.close()  # nothing more to leave
    later = RankWait(_trainer(2))
    distributed.destroy_process_group()
    later.close()  # the strategy has been torn down before
    return value, distributed.is_initialized()


def test_all_ranks_get_what_the_first_one_says_and_can_leave_late() -> None:
    assert on_two_ranks(_ask_the_first) == [({"from": 0}, False)] * 2


def _wait_impatiently() -> str:
    distributed = torch.distributed
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank_wait._PATIENCE = timedelta(seconds=1)
    distributed.barrier()
    wait = RankWait(_trainer(2))
    if distributed.get_rank() == 0:
        time.sleep(3)
        return "late"
    try:
        wait.from_first(None)
    except RuntimeError:
        return "gave up"
    return "got it"


def test_what_ends_the_waiting_is_the_patience_of_its_own_group() -> None:
    assert on_two_ranks(_wait_impatiently) == ["late", "gave up"]
    assert timedelta(days=1) < rank_wait._PATIENCE
