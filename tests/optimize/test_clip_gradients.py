"""Clipping against torch's own functions, and against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.optimize.clip_gradients import clip_by_norm, clip_by_value, clip_units, gradient_norm, spoil


def some_parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 3), (4,), (2, 4, 3, 3), ()]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
    return [*parameters, nn.Parameter(torch.ones(3))]  # the last one has no gradient


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [0.1, 1e6, math.inf])
def test_by_norm_is_torchs_to_the_bit(dtype: torch.dtype, limit: float) -> None:
    ours, theirs = some_parameters(dtype), some_parameters(dtype)
    norm = nn.utils.clip_grad_norm_(theirs, limit)
    assert torch.equal(gradient_norm(ours), norm)
    clip_by_norm(ours, limit)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(ours), _gradients(theirs), strict=True))


def test_the_norm_of_bfloat16_is_summed_in_float32() -> None:
    parameters = some_parameters(torch.bfloat16)
    flat = torch.cat([g.flatten().double() for g in _gradients(parameters)])
    norm = gradient_norm(parameters)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-6)
    clip_by_norm(parameters, 0.5)
    assert gradient_norm(parameters).item() == pytest.approx(0.5, rel=5e-3)


def test_other_norms_and_no_gradients() -> None:
    parameters = some_parameters()
    largest = max(float(g.abs().max()) for g in _gradients(parameters))
    assert gradient_norm(parameters, math.inf).item() == largest
    assert gradient_norm([nn.Parameter(torch.ones(2))]).item() == 0.0
    huge = nn.Parameter(torch.zeros(2))
    huge.grad = torch.tensor([3e38, 1.0])  # its square is no float32
    assert gradient_norm([huge], math.inf).item() == pytest.approx(3e38)


def test_by_value_is_torchs() -> None:
    ours, theirs = some_parameters(), some_parameters()
    clip_by_value(ours, 0.3)
    nn.utils.clip_grad_value_(theirs, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(ours), _gradients(theirs), strict=True))


def test_units_are_held_to_their_weights() -> None:
    """Every unit by a loop over its numbers."""
    ours, plain = some_parameters(), some_parameters()
    clip_units(ours, ratio=1.0)
    changed = 0
    for mine, parameter in zip(_gradients(ours), plain, strict=False):
        whole = parameter.ndim < 2
        rows = [(parameter, parameter.grad)] if whole else list(zip(parameter, parameter.grad, strict=True))
        expected = []
        for weight, gradient in rows:
            allowed = max(math.sqrt(sum(float(w) ** 2 for w in weight.detach().flatten())), 1e-3)
            found = math.sqrt(sum(float(g) ** 2 for g in gradient.flatten()))
            expected.append(gradient * (allowed / found) if found > allowed else gradient)
            changed += found > allowed
        torch.testing.assert_close(mine, torch.stack(expected).reshape(mine.shape))
    assert 0 < changed < 8


def test_a_unit_of_zeros_can_move_and_a_gradient_of_zeros_stays() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    clip_units([weight], ratio=0.5)
    torch.testing.assert_close(weight.grad, torch.tensor([[3e-4, 4e-4], [0.0, 0.0]]))


def test_spoil_leaves_finite_gradients_alone() -> None:
    ours, before = some_parameters(), some_parameters()
    spoil(ours)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(ours), _gradients(before), strict=True))


def _table(sparse: bool, dims: tuple[int, ...] = (6, 3)) -> nn.Parameter:
    """A table whose rows 1 and 4 have gradients; that of row 1 comes in two parts."""
    generator = torch.Generator().manual_seed(8)
    table = nn.Parameter(torch.randn(dims, generator=generator))
    rows, parts = torch.tensor([1, 4, 1]), torch.randn(3, *dims[1:], generator=generator)
    gradient = torch.sparse_coo_tensor(rows[None], parts, dims)
    table.grad = gradient if sparse else gradient.to_dense()
    return table


@pytest.mark.parametrize("dims", [(6, 3), (6,)])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: clip_by_norm(parameters, 0.5),
        lambda parameters: clip_by_value(parameters, 0.3),
        lambda parameters: clip_units(parameters, 0.2),
        spoil,
    ],
    ids=["norm", "value", "agc", "spoil"],
)
def test_sparse_gradients_are_clipped_as_the_dense_ones(clip: Any, dims: tuple[int, ...]) -> None:
    sparse, dense = [_table(True, dims), *some_parameters()], [_table(False, dims), *some_parameters()]
    norm = gradient_norm(sparse)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(_gradients(dense)))
    assert not sparse[0].grad.is_coalesced()  # to look changes nothing
    clip(sparse)
    clip(dense)
    assert sparse[0].grad.layout is torch.sparse_coo
    assert sparse[0].grad.coalesce().indices().tolist() == [[1, 4]]
    for one, other in zip(_gradients(sparse), _gradients(dense), strict=True):
        torch.testing.assert_close(one.to_dense(), other)
    if clip is not spoil:
        assert gradient_norm(sparse) < norm


def test_a_gradient_without_whole_rows_has_no_units() -> None:
    table = nn.Parameter(torch.ones(2, 3))
    table.grad = torch.eye(2, 3).to_sparse()
    with pytest.raises(ValueError, match=r"torch\.sparse_coo and shape \(2, 3\) has no whole rows"):
        clip_units([table])
    clip_by_norm([table], 1.0)
    torch.testing.assert_close(table.grad.to_dense(), torch.eye(2, 3) / math.sqrt(2))
    table = nn.Parameter(torch.eye(2, 3).to_sparse_csr())
    table.grad = torch.eye(2, 3).to_sparse_csr() * 3
    with pytest.raises(ValueError, match="sparse_csr"):
        clip_units([table])
    clip_by_value([table], 0.5)
    torch.testing.assert_close(table.grad.to_dense(), torch.eye(2, 3) * 0.5)


def test_parameters_without_gradients_are_left_alone() -> None:
    assert clip_by_norm([torch.nn.Parameter(torch.ones(2))], 1.0) == 1.0
    assert clip_by_norm([], 1.0) == 1.0
