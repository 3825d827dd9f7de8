"""Batch normalisation over the batches of all ranks, on the CPU, where torch's ``SyncBatchNorm`` raises.

What it does: mean and variance are those of the samples of all ranks together, also where ranks have different
numbers of them, as in one process on the whole batch. ``SpeedkitDDPStrategy`` uses it for
``Trainer(sync_batchnorm=True)`` on the CPU; on a GPU it is torch's own layer.

When it helps: few samples per rank. What it costs: four collectives per layer and step, two of them in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["HostSyncBatchNorm", "sync_as_before", "sync_on_host"]


def sync_on_host(model: nn.Module) -> int:
    """Let each ``SyncBatchNorm`` of a model on the CPU work there. Returns how many there are.

    >>> sync_on_host(nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU()))
    1
    """
    found = 0
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm and all(value.is_cpu for value in module.state_dict().values()):
            module.__class__ = HostSyncBatchNorm  # type: ignore[assignment]  # both have the same attributes
            found += 1
    return found


def sync_as_before(model: nn.Module) -> None:
    """Undo :func:`sync_on_host`."""
    for module in model.modules():
        if type(module) is HostSyncBatchNorm:
            module.__class__ = nn.SyncBatchNorm  # type: ignore[assignment]


class HostSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``torch.nn.SyncBatchNorm`` for tensors on the CPU, with the same arguments and the same state.

    It is no subclass of it: torch's DDP refuses those on the CPU.

    Example:

        >>> HostSyncBatchNorm(3)(torch.randn(8, 3, 5)).mean().abs() < 1e-6
        tensor(True)
    """

    process_group: Any = None

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs at least 2 dimensions, got shape {tuple(input.shape)}.")

    @override
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        shape = [1, -1, *[1] * (input.dim() - 2)]
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        count = values.new_tensor([input.numel() / input.size(1)])
        total = self._sum(torch.cat([values.sum(dims), count]))
        count, mean = total[-1].detach(), total[:-1] / total[-1].detach()
        if self.training and count <= 1:
            raise ValueError(f"BatchNorm needs more than one value per channel in training, got {tuple(input.shape)}.")
        off = values - mean.view(shape)
        variance = self._sum(off.square().sum(dims)) / count
        if self.training:
            self._remember(mean.detach(), variance.detach() * count / (count - 1))
        result = off * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _sum(self, value: Tensor) -> Tensor:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not (self.training and ready and torch.distributed.get_world_size(self.process_group) > 1):
            return value
        apply: Any = _Sum.apply  # typed in some torch versions only
        summed: Tensor = apply(value, self.process_group)
        return summed

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


class _Sum(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group, result = group, value.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        result = gradients[0].contiguous().clone()
        torch.distributed.all_reduce(result, group=ctx.group)
        return result, None
