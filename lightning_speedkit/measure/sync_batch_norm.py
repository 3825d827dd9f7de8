"""Which modules exchange statistics between the ranks in their forward pass."""

from __future__ import annotations

from torch import nn

__all__ = ["holds_sync_batch_norm"]


def holds_sync_batch_norm(module: nn.Module) -> bool:
    """Whether ranks wait for each other inside the forward pass, in torch's SyncBatchNorm or this kit's for CPUs.

    The latter says so by its attribute ``exchanges_statistics``; it is no subclass, since DDP refuses those on a CPU.

    >>> holds_sync_batch_norm(nn.Sequential(nn.SyncBatchNorm(2))), holds_sync_batch_norm(nn.BatchNorm1d(2))
    (True, False)
    """
    return any(
        isinstance(part, nn.SyncBatchNorm) or getattr(part, "exchanges_statistics", False) is True
        for part in module.modules()
    )
