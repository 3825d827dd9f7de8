"""The arithmetic of fake quantization: values rounded to the grid that an integer kernel would compute on.

Weights get one scale per output channel (or per group of inputs, for int4), symmetric around zero. Activations get one
scale and one zero point per layer, from a running range. All of it stays on the device: no value is read by Python.

Rounding has no gradient, so the gradient passes as if nothing were rounded, and is zero where a value was cut off at
the end of the grid (the straight-through estimator; Jacob et al. 2018, arXiv 1712.05877).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ActivationRange", "WeightGrid", "fake_quantize_activation", "restore_range", "update_ranges"]

_SMALLEST = torch.finfo(torch.float32).eps  # of a scale: a layer of zeros would divide by zero
_MOMENTUM = 0.01  # of a running range, that of torch's own moving-average observer


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """How a weight is rounded: ``bits`` per value, one scale for each index of ``axis``.

    With ``group`` one scale for each ``group`` values along the last dimension of a matrix, in its place. ``full``
    takes the whole range of the integers, as torchao does; otherwise the lowest is left out, so that a factor of
    either sign on a channel changes only its scale, and a BatchNorm may be folded in later without rounding anew.

    >>> WeightGrid(bits=3)(torch.tensor([[3.0, 1.4, -0.6]]))
    tensor([[ 3.,  1., -1.]])
    """

    bits: int = 8
    axis: int = 0
    group: int | None = None
    full: bool = False

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer."""
        top = 2 ** (self.bits - 1) - 1
        return (-top - 1 if self.full else -top), top

    def scale(self, weight: Tensor) -> Tensor:
        """The scale of each channel or group, float32; ``weight`` is a matrix of groups if there are groups."""
        low, high = self.limits
        others = [d for d in range(weight.ndim) if d != self.axis]
        largest = weight.detach().abs().amax(dim=others) if others else weight.detach().abs()
        return (largest / ((high - low) / 2)).clamp(min=_SMALLEST)

    def __call__(self, weight: Tensor) -> Tensor:
        """``weight`` on its grid, in its dtype and shape, with the gradient of the straight-through estimator."""
        values = weight.float()
        if self.group is not None:
            values = values.reshape(-1, self.group)
        scale = self.scale(values)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        low, high = self.limits
        rounded = torch.fake_quantize_per_channel_affine(values, scale, zero, self.axis, low, high)
        return rounded.reshape(weight.shape).to(weight.dtype)


class ActivationRange:
    """The running range of one layer's inputs, and the grid that follows from it.

    ``observe`` notes the range of a tensor, for :func:`update_ranges` to take it in when the batch is done; so each
    call within a batch, also one that is repeated in the backward pass, is rounded alike. ``known`` says whether there
    is a range yet. Tensors have no dimension.
    """

    def __init__(self, bits: int, device: torch.device | str = "cpu") -> None:
        self.bits = bits
        self.known = False
        self.called = False  # since the last update
        self.low = torch.full((), torch.nan, device=device)
        self.high = torch.full((), torch.nan, device=device)
        self.scale = torch.ones((), device=device)
        self.zero_point = torch.zeros((), dtype=torch.int32, device=device)
        self.seen_low = torch.full((), torch.inf, device=device)
        self.seen_high = torch.full((), -torch.inf, device=device)

    def observe(self, values: Tensor) -> None:
        """Note the smallest and the largest of ``values``; what is not finite is left out at the update."""
        if values.numel() == 0:
            return
        low, high = torch.aminmax(values.detach().float())
        self.seen_low.copy_(torch.minimum(self.seen_low, low))
        self.seen_high.copy_(torch.maximum(self.seen_high, high))
        self.called = True

    def __call__(self, values: Tensor) -> Tensor:
        """``values`` on the grid of the running range; as they are while there is none."""
        if not self.known:
            return values
        top = 2**self.bits - 1
        return torch.fake_quantize_per_tensor_affine(values.float(), self.scale, self.zero_point, 0, top).to(
            values.dtype
        )


@torch.no_grad()
def update_ranges(ranges: Sequence[ActivationRange], reduce: Callable[[Tensor], Tensor] | None = None) -> None:
    """Take what was observed into the running ranges: the first as it is, then a hundredth of the way to each.

    ``reduce`` takes the maximum of a tensor over all ranks, so that every rank has the same ranges; it is called once,
    and has to be called on all of them.

    >>> layer = ActivationRange(bits=8)
    >>> for largest in (1.0, 2.0):
    ...     layer.observe(torch.tensor([0.0, largest]))
    ...     update_ranges([layer])
    >>> round(layer.high.item(), 6)
    1.01
    """
    if not ranges:
        return
    seen = torch.stack([torch.stack([-one.seen_low, one.seen_high]) for one in ranges])
    if reduce is not None:
        seen = reduce(seen)
    usable = torch.isfinite(seen).all(dim=1, keepdim=True)
    old = torch.stack([torch.stack([one.low, one.high]) for one in ranges])
    new = torch.stack([-seen[:, 0], seen[:, 1]], dim=1).where(usable, old)
    _set_ranges(ranges, torch.where(torch.isnan(old), new, torch.lerp(old, new, _MOMENTUM)))
    if any(one.called and not one.known for one in ranges):  # which waits for the device
        for one, is_usable in zip(ranges, usable[:, 0].tolist(), strict=True):
            one.known = one.known or is_usable
    for one in ranges:
        one.called = False
        one.seen_low.fill_(torch.inf)
        one.seen_high.fill_(-torch.inf)


def _set_ranges(ranges: Sequence[ActivationRange], values: Tensor) -> None:
    scale, zero_point = _affine_grid(values[:, 0], values[:, 1], ranges[0].bits)
    for index, one in enumerate(ranges):
        one.low.copy_(values[index, 0])
        one.high.copy_(values[index, 1])
        one.scale.copy_(scale[index])
        one.zero_point.copy_(zero_point[index])


def restore_range(one: ActivationRange, low: float, high: float) -> None:
    """Give ``one`` a range that it had before, as from a checkpoint."""
    _set_ranges([one], torch.tensor([[low, high]], device=one.low.device))
    one.known = True


def fake_quantize_activation(values: Tensor, bits: int = 8) -> Tensor:
    """``values`` on the grid of their own range, as a kernel that measures it at each call rounds them.

    >>> fake_quantize_activation(torch.tensor([0.0, 0.4, 3.0]), bits=2)
    tensor([0., 0., 3.])
    """
    if values.numel() == 0:
        return values
    low, high = torch.aminmax(values.detach().float())
    scale, zero_point = _affine_grid(low, high, bits)
    return torch.fake_quantize_per_tensor_affine(values.float(), scale, zero_point, 0, 2**bits - 1).to(values.dtype)


def _affine_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    # zero is always on the grid: padding is made of it
    top = 2**bits - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / top).clamp(min=_SMALLEST)
    return scale, (-low / scale).round().clamp(0, top).to(torch.int32)
