"""Two ranks read what the other wrote, from two threads."""

from __future__ import annotations

import torch

from lightning_speedkit.parallel.rank_store import open_store
from tests.two_ranks import on_two_ranks


def _talk() -> list[bytes]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mine, threads = open_store("127.0.0.1")
    mine.set(f"from {rank}", f"{rank}")
    found = [threads.get("from 0"), threads.get("from 1"), mine.get(f"from {1 - rank}")]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def test_what_one_writes_the_other_reads() -> None:
    assert on_two_ranks(_talk, timeout=60) == [[b"0", b"1", b"1"], [b"0", b"1", b"0"]]
