"""Counting of storages: sums worked out by hand."""

from __future__ import annotations

import torch

from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes

_KB = 256  # float32 values


def test_views_count_once_and_what_was_there_does_not() -> None:
    there = torch.ones(4, _KB)
    with LiveBytes() as live:
        part = there[1:]
        part.add_(1)
        made = torch.cat([there, there])  # 8 KB
        views = [made.view(-1), made[0], made.t()]
        assert live.now == 8192
        del made
        assert live.now == 8192  # a view holds it
        del views
        assert (live.now, live.peak) == (0, 8192)
        twice = torch.ones(_KB) + torch.ones(_KB)  # three at once
        assert (live.now, twice.numel()) == (1024, _KB)
    assert live.peak == 8192
