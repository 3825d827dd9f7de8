"""A convolution as a spatial one in groups of channels and a pointwise one that mixes them.

What it does: the kernels of ``W``, of shape (out, in, k, k), are approximated in each group of input channels by
``rank`` spatial kernels. With a group for each input channel this is the depthwise-separable convolution of MobileNet,
with ``rank`` as its depth multiplier; with a few groups a grouped convolution; with one group a convolution to ``rank``
channels. Padding, stride and dilation stay with the spatial part. Per output position it takes
``rank * (in * k * k + groups * out)`` multiply-adds instead of ``in * out * k * k``.

In each group the start is the best there is: the kernels, laid out as a matrix of ``out`` rows, are replaced by their
nearest matrix of that rank, and the squared error is the sum over the groups of the squared singular values left out.

When it helps: convolutions of many channels, on devices whose depthwise kernels are good. What it costs: accuracy that
has to be trained back, and sometimes time, since a depthwise kernel does little work for each byte it reads.

Sources: A. Howard et al., "MobileNets", 2017; J. Guo et al., "Network Decoupling: From Regular to Depthwise Separable
Convolutions", 2018, for the sum of several depthwise kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_speedkit.architecture.low_rank import best_factors

__all__ = ["SeparableConv", "grouped_matrices", "separate_convolution"]

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class SeparableConv(nn.Module):
    """``pointwise(spatial(x))`` in place of a convolution, called as it is, with the attributes of a plain one.

    ``weight`` is computed from the two parts each time it is read; to write to it changes nothing.

    Args:
        spatial: A convolution with ``groups`` groups and the same number of outputs in each, without bias.
        pointwise: A convolution with kernels of size 1 from those outputs.

    >>> import torch
    >>> spatial = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    >>> layer = SeparableConv(spatial, nn.Conv2d(8, 16, 1))
    >>> layer(torch.zeros(1, 8, 5, 5)).shape, layer.weight.shape, layer.out_channels
    (torch.Size([1, 16, 5, 5]), torch.Size([16, 8, 3, 3]), 16)
    """

    def __init__(self, spatial: _Conv, pointwise: _Conv) -> None:
        super().__init__()
        self.spatial, self.pointwise = spatial, pointwise
        self.in_channels, self.out_channels = spatial.in_channels, pointwise.out_channels
        self.kernel_size, self.stride, self.dilation = spatial.kernel_size, spatial.stride, spatial.dilation
        self.padding, self.padding_mode = spatial.padding, spatial.padding_mode
        self.groups = 1  # of the convolution that this one stands for

    @property
    def weight(self) -> Tensor:
        """The kernels that the two parts amount to, of shape ``(out_channels, in_channels, *kernel_size)``."""
        groups, inside = self.spatial.groups, self.spatial.in_channels // self.spatial.groups
        up = self.pointwise.weight.reshape(self.out_channels, groups, -1).movedim(1, 0)
        down = self.spatial.weight.reshape(groups, up.shape[-1], -1)
        kernels = (up @ down).reshape(groups, self.out_channels, inside, *self.kernel_size)
        return kernels.movedim(0, 1).flatten(1, 2)

    @property
    def bias(self) -> Tensor | None:
        """The bias, a parameter of ``pointwise``."""
        return self.pointwise.bias

    @override
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.pointwise(self.spatial(input))
        return result


def separate_convolution(conv: _Conv, groups: int, rank: int = 1, *, warm_start: bool = True) -> SeparableConv:
    """The pair that is nearest to ``conv``, with its geometry, device, dtype, mode and ``requires_grad``.

    ``conv`` is not changed. The bias of the result is the same parameter as that of ``conv``.

    Args:
        conv: A plain convolution in one, two or three dimensions with one group.
        groups: Groups of input channels in the spatial part; ``conv.in_channels`` for a depthwise-separable one.
        rank: Kernels of the spatial part in each group.
        warm_start: Start from the nearest kernels; otherwise from torch's own random weights.

    Raises:
        ValueError: ``conv`` has groups already, ``groups`` does not divide its channels, ``rank`` is out of range, or
            the weights to start from have no data or are not finite.

    >>> import torch
    >>> conv = nn.Conv2d(4, 16, 3, padding=1)
    >>> x = torch.randn(2, 4, 6, 6)
    >>> bool(torch.allclose(separate_convolution(conv, groups=4, rank=9)(x), conv(x), atol=1e-5))  # 9 = 3 * 3
    True
    """
    if conv.groups != 1:
        raise ValueError(
            f"The convolution has {conv.groups} groups already; only one with a single group is separated."
        )
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups is a whole number, got {groups!r}.")
    if groups < 1 or conv.in_channels % groups:
        raise ValueError(f"groups={groups} must divide the {conv.in_channels} input channels.")
    weight, inside = conv.weight, conv.in_channels // groups
    largest = min(conv.out_channels, inside * weight[0, 0].numel())
    if not 1 <= rank <= largest:
        raise ValueError(f"rank={rank} in groups of {inside} channels must be from 1 to {largest}.")
    kind = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(conv, kind))
    told: dict[str, Any] = {"device": "meta" if warm_start else weight.device, "dtype": weight.dtype}
    geometry: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    geometry |= {"kernel_size": conv.kernel_size, "padding_mode": conv.padding_mode, "groups": groups, "bias": False}
    spatial = kind(conv.in_channels, groups * rank, **geometry, **told)
    pointwise = kind(groups * rank, conv.out_channels, 1, bias=conv.bias is not None, **told)
    if warm_start:
        up, down = best_factors(grouped_matrices(weight.detach(), groups), rank)
        spatial.weight = nn.Parameter(down.reshape(spatial.weight.shape))
        pointwise.weight = nn.Parameter(up.movedim(0, 1).reshape(pointwise.weight.shape).contiguous())
        if conv.bias is not None:
            pointwise.bias = conv.bias
    elif conv.bias is not None and pointwise.bias is not None:
        pointwise.bias.requires_grad_(conv.bias.requires_grad)
    for part in (spatial, pointwise):
        part.weight.requires_grad_(weight.requires_grad)
    return SeparableConv(spatial, pointwise).train(conv.training)


def grouped_matrices(weight: Tensor, groups: int) -> Tensor:
    """The kernels of each group of input channels as a matrix: ``(groups, out, in / groups * kernel)``.

    >>> import torch
    >>> grouped_matrices(torch.zeros(16, 8, 3, 3), groups=4).shape
    torch.Size([4, 16, 18])
    """
    return weight.reshape(len(weight), groups, -1).movedim(1, 0)
