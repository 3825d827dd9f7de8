"""What the ranks that share a batch tell each other while gradients are accumulated.

What it does: sums of single numbers over the ranks that see different data: all of them under DDP, one dimension of the
mesh under FSDP2 with tensor parallelism. What it costs: a collective per call; nothing on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch import distributed as dist

__all__ = ["DataRanks"]


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The ranks that see different data.

    Every method is to be called on all of them.

    Args:
        size: How many there are.
        rank: Which one this is.
        device: Where numbers are exchanged.
        group: Their process group; ``None`` is the default one.
        averages_at_once: Each backward averages its gradients over the ranks, not only the last one of a window.

    >>> alone = DataRanks()
    >>> alone.total(3), alone.largest(2.0), alone.any_holds([True, False])
    (3, 2.0, [True, False])
    """

    size: int = 1
    rank: int = 0
    device: torch.device | None = None
    group: Any = None
    averages_at_once: bool = False

    @classmethod
    def of(cls, trainer: pl.Trainer) -> DataRanks:
        """The ranks of a run whose strategy is set up."""
        strategy = trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            mesh = strategy.device_mesh["data_parallel"]
            return cls(mesh.size(), mesh.get_local_rank(), strategy.root_device, mesh.get_group(), True)
        return cls(trainer.world_size, trainer.global_rank, strategy.root_device)

    def total(self, number: float | Tensor) -> float | Tensor:
        """The sum, as a tensor if there are several ranks: nothing waits for it.

        ``Strategy.reduce`` would set a barrier before it.
        """
        if self.size == 1:
            return number
        if isinstance(number, Tensor):
            total = number.to(self.device, torch.float64, copy=True)
        else:
            total = torch.full((), number, dtype=torch.float64, device=self.device)  # filled there: a copy would wait
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks, in the memory of the tensor."""
        dist.all_reduce(tensor, group=self.group)
        return tensor.div_(self.size)

    def largest(self, number: float) -> float:
        """The largest over the ranks; waits for it."""
        if self.size == 1:
            return number
        found = torch.full((), number, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return float(found)

    def any_holds(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank; waits for it."""
        if self.size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]
