"""A small store of texts that all ranks of a run read and write, beside their collectives."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in torch's __all__

__all__ = ["TCPStore", "open_store"]


def open_store(address: str) -> tuple[TCPStore, TCPStore]:
    """Two ways to one store, for two threads: one answers one question at a time. All ranks have to call it.

    The store lives in the process of rank 0, on a port of its own.

    Args:
        address: The host of rank 0.
    """
    wait = timedelta(seconds=30)
    leads = torch.distributed.get_rank() == 0
    first = TCPStore(address, 0, None, True, wait, wait_for_workers=False) if leads else None
    ports = [first.port if first else 0]
    torch.distributed.broadcast_object_list(ports, src=0)
    mine = first or TCPStore(address, ports[0], None, False, wait)
    return mine, TCPStore(address, ports[0], None, False, wait)
