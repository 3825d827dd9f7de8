"""The arithmetic of gradient clipping, for any training loop: by norm, by value, and unit by unit.

What it does: it cuts gradients down in place. When it helps: rare gradients that are far larger than the others and
would undo what was learnt. What it costs: a pass over the gradients for the norm and one for the multiplication; the
host does not wait for the device. Sharded gradients (DTensor, as FSDP2 has them) are taken as the whole that they are
part of, and sparse ones (``nn.Embedding(sparse=True)``) as the dense ones that they stand for. Call it after gradients
are unscaled, before the optimizer steps.

Sources: Pascanu et al., On the difficulty of training recurrent neural networks, 2013 (norm); Brock et al.,
High-Performance Large-Scale Image Recognition Without Normalization, 2021 (AGC: ratio 0.01, least weight norm 0.001).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["clip_by_norm", "clip_by_value", "clip_units", "gradient_norm", "spoil"]


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as if they were one vector: a tensor of no dimension on their device.

    Sharded gradients (DTensor, as FSDP2 has them) are summed over their ranks, so all ranks have to call it; 16-bit
    ones are summed in float32. ``norm_type`` may be ``float("inf")``. Without any gradient it is 0.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norm([weight])
    tensor(5.)
    """
    gradients = [_numbers(p.grad) for p in parameters if p.grad is not None]
    if gradients and all(type(gradient) is Tensor for gradient in gradients):
        return _norm_of(gradients, norm_type)
    alike: dict[Any, list[Tensor]] = defaultdict(list)  # by the mesh of their shards
    for gradient in gradients:
        alike[getattr(gradient, "device_mesh", None)].append(gradient)
    norms = [_norm_of(group, norm_type) for group in alike.values()]
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms]) if norms else torch.zeros(1)
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total


def _norm_of(gradients: list[Tensor], norm_type: float) -> Tensor:
    dtype, device = gradients[0].dtype, gradients[0].device
    if dtype in (torch.float32, torch.float64) and all(
        type(g) is Tensor and g.dtype is dtype and g.device == device for g in gradients
    ):  # what get_total_norm does, without its sorting by device and kind
        plain: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, norm_type)), norm_type)
        return plain
    if any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients):
        norms = [
            torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients
        ]
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    else:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Tensor], limit: float | Tensor, norm: Tensor | None = None) -> Tensor:
    """Scale all gradients in place so that their common 2-norm is at most ``limit``; returns the factor.

    ``norm`` is their norm, where it is known already. The factor is ``limit / (norm + 1e-6)``, 1 at most, as in
    ``torch.nn.utils.clip_grad_norm_``.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_by_norm([weight], 1.0)
    tensor(0.2000)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters) if norm is None else norm
    factor = (limit / (norm + 1e-6)).clamp_(max=1.0)
    gradients = _local_gradients(parameters)
    if not gradients:
        return factor
    home = factor.device
    if all(gradient.device == home for gradient in gradients):
        torch._foreach_mul_(gradients, factor)
        return factor
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_device[gradient.device].append(gradient)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device))
    return factor


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], limit: float | Tensor) -> None:
    """Cut every element of the gradients in place to ``[-limit, limit]``. NaN stays NaN, infinities become ``limit``.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([0.5, -4.0])
    >>> clip_by_value([weight], 1.0)
    >>> weight.grad
    tensor([ 0.5000, -1.0000])
    """
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-limit, limit)  # type: ignore[arg-type]


@torch.no_grad()
def clip_units(parameters: Iterable[Tensor], ratio: float | Tensor = 0.01, least: float = 1e-3) -> None:
    """Adaptive gradient clipping: scale the gradient of each unit to at most ``ratio`` times the norm of its weights.

    A unit is a row of a matrix, an output channel of a convolution, or a whole vector such as a bias. Weights count
    with a norm of at least ``least``, so that those that start at 0 can move. The paper leaves the last layer out.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    >>> weight.grad = torch.ones(2, 2)
    >>> clip_units([weight], ratio=0.5)  # rows may have norms of 2.5 and 0.25; the gradient's have 1.41
    >>> weight.grad.norm(dim=1)
    tensor([1.4142, 0.2500])
    """
    for parameter in parameters:
        if parameter.grad is not None:
            weights, gradient = parameter.detach(), parameter.grad
            if gradient.layout is not torch.strided:
                weights, gradient = _units_of_sparse(parameter)
            allowed = _unit_norms(weights).clamp(min=least) * ratio
            found = _unit_norms(gradient)
            gradient.mul_((allowed / found).clamp(max=1.0).where(found > allowed, 1.0))


@torch.no_grad()
def spoil(parameters: Iterable[Tensor]) -> None:
    """Make every gradient NaN if one of them is not finite, so that clipping by value does not hide an infinity.

    Needed where an overflow is looked for only after clipping: under fp16 with a fused optimizer.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([0.5, float("inf")])
    >>> spoil([weight])
    >>> weight.grad
    tensor([nan, nan])
    """
    parameters = list(parameters)
    nothing = gradient_norm(parameters, float("inf")) * 0  # NaN, if there is an infinity
    for gradient in _local_gradients(parameters):
        gradient.add_(nothing.to(gradient.device))


def _unit_norms(tensor: Tensor) -> Tensor:
    dims = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=tensor.ndim > 1, dtype=dtype)
    return norms.to(tensor.dtype)


def _units_of_sparse(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse gradient, to be changed in place, and those of the weights that they belong to."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ValueError(
            f"A gradient of layout {gradient.layout} and shape {tuple(gradient.shape)} has no whole rows, so it cannot "
            "be clipped unit by unit. Clip by norm or by value, or use a dense gradient."
        )
    gradient = parameter.grad = gradient.coalesce()
    weights = parameter.detach()
    return weights[gradient.indices()[0]] if weights.ndim > 1 else weights, gradient.values()


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The numbers of the gradients, to be changed in place: of a sharded one, those that are here."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
            gradient = parameter.grad = gradient.coalesce()
        numbers: Any = _numbers(gradient)
        is_whole = type(numbers) is Tensor or not hasattr(numbers, "to_local")
        gradients.append(numbers if is_whole else numbers.to_local())
    return gradients


def _numbers(gradient: Tensor) -> Tensor:
    """Of a sparse gradient those that are not zero: parts of one number that are kept apart are added first."""
    if gradient.layout is torch.strided:
        return gradient
    return (gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient).values()
