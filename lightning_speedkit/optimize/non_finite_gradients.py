"""Looks for numbers that are not finite in the gradients of an optimizer, without waiting for the device.

What it does: it fills one flag on the device. When it helps: to skip a step in any training loop. What it costs: one
pass over the gradients. Source: PyTorch ``GradScaler``, whose kernel it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["can_skip_by_itself", "gradients_of", "has_non_finite_gradient", "is_read_freely", "non_finite_flag"]


_ONE = torch.ones((), device="cpu")


def has_non_finite_gradient(optimizer: torch.optim.Optimizer) -> Tensor:
    """Whether there is a NaN or an infinity in any gradient: a tensor of no dimension on their device, 1.0 or 0.0.

    With sharded gradients (DTensor) all ranks have to call it, and all get the same. Sparse and complex gradients are
    looked at too.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, float("inf")])
    >>> has_non_finite_gradient(torch.optim.SGD([weight]))
    tensor(1.)
    """
    return non_finite_flag(gradients_of(optimizer))


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that a step of this optimizer would take."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def non_finite_flag(gradients: Sequence[Tensor]) -> Tensor:
    """:func:`has_non_finite_gradient` of the gradients themselves."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    is_sharded = False
    for gradient in gradients:
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            gradient, is_sharded = gradient.to_local(), True
        numbers = _numbers(gradient)
        alike[numbers.device, numbers.dtype].append(numbers)
    flags: dict[torch.device, Tensor] = {}
    for (device, _), group in alike.items():
        if device not in flags:
            flags[device] = torch.zeros((), device=device)
        # What GradScaler calls, here with a factor of exactly 1: one kernel where a norm takes several.
        factor = _ONE if device.type == "cpu" else torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flags[device], factor)
    first, *others = flags.values() or [torch.zeros(())]
    for other in others:
        first = first + other.to(first.device)
    if is_sharded:  # a sum, since the maximum of NaN and a number is a number on some backends
        torch.distributed.all_reduce(first)
    return first.clamp(max=1.0) if others or is_sharded else first


def can_skip_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused kernel of this optimizer leaves everything as it is if it finds its flag set.

    That of SGD with momentum does not in its first step: it takes buffers that nothing was written to for momenta.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )


def is_read_freely(flag: Tensor) -> bool:
    """Whether nothing waits where the flag is read."""
    return flag.device.type == "cpu"


def _numbers(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, as one that the kernel takes: dense and real."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce().values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
