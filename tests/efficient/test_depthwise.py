"""The pair against the plain convolution, and its error against a singular value decomposition per input channel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture.depthwise import SeparableConv, grouped_matrices, separate_convolution

GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2), "bias": False},
    {"kernel_size": 3, "dilation": 2, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_pair_convolves_with_the_kernels_that_it_tells(geometry: dict[str, Any], groups: int) -> None:
    conv = nn.Conv2d(6, 10, **geometry)
    made = separate_convolution(conv, groups, rank=1)
    x = torch.randn(2, 6, 9, 11)
    plain = copy.deepcopy(conv)
    plain.weight = nn.Parameter(made.weight.detach().clone())
    assert made(x).shape == conv(x).shape
    torch.testing.assert_close(made(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("make", "space"), [(nn.Conv1d, (9,)), (nn.Conv2d, (7, 6)), (nn.Conv3d, (5, 4, 6))])
def test_at_full_rank_it_computes_the_same(make: Any, space: tuple[int, ...]) -> None:
    conv = make(4, 64, 3, padding=1)
    x = torch.randn(2, 4, *space)
    for groups in (1, 2, 4):
        full = min(64, 4 // groups * 3 ** len(space))
        torch.testing.assert_close(separate_convolution(conv, groups, full)(x), conv(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_error_is_what_the_nearest_kernels_of_each_input_channel_leave_out(rank: int) -> None:
    conv = nn.Conv2d(5, 16, 3, dtype=torch.float64)
    made = separate_convolution(conv, groups=5, rank=rank)
    lost = (conv.weight - made.weight).square().sum()
    expected = sum(
        torch.linalg.svdvals(conv.weight[:, channel].flatten(1))[rank:].square().sum() for channel in range(5)
    )
    torch.testing.assert_close(lost.detach(), torch.as_tensor(expected).detach())


def test_one_kernel_per_channel_is_found_again() -> None:
    spatial, mix = torch.randn(4, 3, 3), torch.randn(8, 4)
    conv = nn.Conv2d(4, 8, 3)
    conv.weight = nn.Parameter(torch.einsum("oi,ihw->oihw", mix, spatial))
    torch.testing.assert_close(separate_convolution(conv, groups=4).weight, conv.weight, atol=1e-5, rtol=1e-5)


def test_the_pair_keeps_dtype_mode_frozen_weights_and_its_bias() -> None:
    conv = nn.Conv2d(4, 8, 3, dtype=torch.float64).eval()
    conv.weight.requires_grad_(False)
    state = torch.get_rng_state()
    made = separate_convolution(conv, groups=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert made.bias is conv.bias
    assert not made.training
    assert not made.spatial.weight.requires_grad
    assert not made.pointwise.weight.requires_grad
    assert {p.dtype for p in made.parameters()} == {torch.float64}
    assert (made.in_channels, made.out_channels, made.groups, made.kernel_size) == (4, 8, 1, (3, 3))
    fresh = separate_convolution(conv, groups=4, warm_start=False)
    assert fresh.bias is not conv.bias
    assert not fresh.pointwise.weight.requires_grad
    assert isinstance(fresh, SeparableConv)


def test_the_matrices_hold_the_channels_of_their_group() -> None:
    weight = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3)
    assert torch.equal(grouped_matrices(weight, 2)[1, 0], weight[0, 2:].flatten())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="4 groups already"):
        separate_convolution(nn.Conv2d(4, 4, 3, groups=4), groups=4)
    with pytest.raises(ValueError, match="groups=3 must divide the 4 input channels"):
        separate_convolution(nn.Conv2d(4, 4, 3), groups=3)
    with pytest.raises(ValueError, match="rank=10 in groups of 1 channels must be from 1 to 9"):
        separate_convolution(nn.Conv2d(4, 16, 3), groups=4, rank=10)
    with pytest.raises(TypeError, match="groups is a whole number"):
        separate_convolution(nn.Conv2d(4, 4, 3), groups=2.0)  # type: ignore[arg-type]
