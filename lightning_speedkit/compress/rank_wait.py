"""The ranks that have nothing to do wait for the first one, however long it takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["RankWait"]

_PATIENCE = timedelta(days=7)


class RankWait:
    """Made on all ranks at the same point, while all of them are there; :meth:`from_first` is called once on all.

    Waiting in a collective of the training ends the run after its timeout, ten minutes with NCCL. This one goes over
    the host in a group of its own, whose timeout is a week; a rank that is gone is noticed at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._strategy = trainer.strategy
        several = trainer.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if several else None

    def from_first(self, value: Any) -> Any:
        """``value`` of rank 0, on every rank."""
        if self._group is None:
            return self._strategy.broadcast(value)
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = None
