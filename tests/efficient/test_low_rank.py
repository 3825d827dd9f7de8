"""The factors against torch's full singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture.low_rank import (
    FactoredLinear,
    best_factors,
    factor_linear,
    squared_singular_values,
)


@pytest.mark.parametrize("shape", [(1, 20, 12), (3, 12, 20), (2, 7, 7)])
@pytest.mark.parametrize("rank", [1, 5, 7])
def test_the_error_is_that_of_eckart_and_young(shape: tuple[int, int, int], rank: int) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    up, down = best_factors(matrices, rank)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    nearest = left[..., :rank] @ torch.diag_embed(values[..., :rank]) @ right[..., :rank, :]
    torch.testing.assert_close(up @ down, nearest)
    lost = (matrices - up @ down).square().sum((-1, -2))
    torch.testing.assert_close(lost, values[..., rank:].square().sum(-1))
    torch.testing.assert_close(squared_singular_values(matrices), values.square())
    torch.testing.assert_close(up.norm(dim=-2), down.norm(dim=-1))  # both carry the square root of the values


@pytest.mark.parametrize("matrix", [torch.zeros(1, 4, 6), torch.ones(1, 4, 6), torch.eye(6).unsqueeze(0)[:, :2]])
def test_a_matrix_of_lower_rank_is_kept_and_stays_finite(matrix: torch.Tensor) -> None:
    up, down = best_factors(matrix, 2)
    torch.testing.assert_close(up @ down, matrix)


def test_the_layer_keeps_dtype_mode_frozen_weights_and_its_bias() -> None:
    linear = nn.Linear(12, 8, dtype=torch.float16).eval()
    linear.weight.requires_grad_(False)
    state = torch.get_rng_state()
    made = factor_linear(linear, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert made.bias is linear.bias
    assert {p.dtype for p in made.parameters()} == {torch.float16}
    assert not made.training
    assert [p.requires_grad for p in made.parameters()] == [False, False, True]
    assert (made.in_features, made.out_features, made.rank, made.weight.shape) == (12, 8, 3, (8, 12))
    assert factor_linear(nn.Linear(4, 4, bias=False), 2).bias is None


def test_without_a_warm_start_it_is_a_fresh_layer() -> None:
    linear = nn.Linear(12, 8)
    linear.bias.requires_grad_(False)
    made = factor_linear(linear, 3, warm_start=False)
    assert made.bias is not linear.bias
    assert made.bias is not None
    assert not made.bias.requires_grad
    torch.manual_seed(1)
    one = factor_linear(linear, 3, warm_start=False)
    torch.manual_seed(1)
    other = FactoredLinear(12, 8, 3)
    assert torch.equal(one.weight, other.weight)


def test_it_trains_like_the_product_of_two_matrices() -> None:
    made = factor_linear(nn.Linear(6, 5), 2)
    x = torch.randn(4, 6)
    up, down = made.up.weight.detach().clone().requires_grad_(), made.down.weight.detach().clone().requires_grad_()
    made(x).square().sum().backward()
    assert made.bias is not None
    (x @ down.T @ up.T + made.bias.detach()).square().sum().backward()
    torch.testing.assert_close(made.up.weight.grad, up.grad)
    torch.testing.assert_close(made.down.weight.grad, down.grad)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=9 of Linear\(12, 8\) must be from 1 to 8"):
        factor_linear(nn.Linear(12, 8), 9)
    with pytest.raises(TypeError, match="rank is a whole number"):
        FactoredLinear(4, 4, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"meta device and have no data.*warm_start=False"):
        factor_linear(nn.Linear(4, 4, device="meta"), 2)
    assert factor_linear(nn.Linear(4, 4, device="meta"), 2, warm_start=False).weight.is_meta
    broken = nn.Linear(4, 4)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        factor_linear(broken, 2)
