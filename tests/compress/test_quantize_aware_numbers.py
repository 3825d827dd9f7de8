"""The grids of fake quantization against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_speedkit.compress.quantize_aware_numbers import (
    ActivationRange,
    WeightGrid,
    fake_quantize_activation,
    restore_range,
    update_ranges,
)

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


def test_a_weight_has_a_scale_for_each_channel() -> None:
    weight = torch.tensor([[3.0, 1.4], [-0.6, 0.26]])
    grid = WeightGrid(bits=3)  # integers from -3 to 3
    assert grid.limits == (-3, 3)
    torch.testing.assert_close(grid.scale(weight), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(grid(weight), torch.tensor([[3.0, 1.0], [-0.6, 0.2]]))
    columns = WeightGrid(bits=3, axis=1)
    torch.testing.assert_close(columns.scale(weight), torch.tensor([1.0, 1.4 / 3]))
    torch.testing.assert_close(columns(weight), torch.tensor([[3.0, 1.4], [-1.0, 1.4 / 3]]))


def test_the_full_range_has_one_more_integer() -> None:
    grid = WeightGrid(bits=3, full=True)  # integers from -4 to 3, scale 7 / 3.5
    torch.testing.assert_close(grid(torch.tensor([[-7.0, 7.0, 3.0]])), torch.tensor([[-8.0, 6.0, 4.0]]))


def test_groups_are_rows_of_their_own() -> None:
    weight = torch.tensor([[3.0, 1.4, 30.0, 14.0], [0.3, 0.14, 6.0, 1.0]])
    torch.testing.assert_close(
        WeightGrid(bits=3, group=2)(weight), torch.tensor([[3.0, 1.0, 30.0, 10.0], [0.3, 0.1, 6.0, 0.0]])
    )


def test_zeros_stay_and_the_dtype_too_and_the_gradient_passes() -> None:
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert torch.equal(WeightGrid()(weight), weight)
    assert WeightGrid()(weight).dtype == torch.bfloat16
    weight = torch.tensor([[3.0, 1.4]], requires_grad=True)
    (WeightGrid(bits=3)(weight) * torch.tensor([[5.0, 7.0]])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[5.0, 7.0]]


def test_a_running_range_moves_a_hundredth_of_the_way() -> None:
    one = ActivationRange(bits=8)
    batches = [(-1.0, 3.0), (-5.0, 1.0), (0.5, 3.0)]
    low, high = batches[0]
    for number, batch in enumerate(batches):
        one.observe(torch.tensor(batch))
        update_ranges([one])
        if number:
            low, high = low + 0.01 * (batch[0] - low), high + 0.01 * (batch[1] - high)
    assert (one.low.item(), one.high.item()) == pytest.approx((low, high), rel=1e-6)
    assert one.scale.item() == pytest.approx((high - low) / 255, rel=1e-6)
    assert one.zero_point.item() == round(-low / ((high - low) / 255))


def test_a_batch_of_several_calls_counts_once_and_rounds_alike() -> None:
    one = ActivationRange(bits=2)
    x = torch.tensor([0.4, 2.6])
    one.observe(torch.tensor([0.0, 3.0]))
    assert one(x) is x  # no range is known yet
    one.observe(torch.tensor([-3.0, 0.0]))
    update_ranges([one])
    assert (one.low.item(), one.high.item()) == (-3.0, 3.0)
    update_ranges([one])  # nothing was seen since
    assert (one.low.item(), one.high.item()) == (-3.0, 3.0)
    torch.testing.assert_close(one(x), torch.tensor([0.0, 2.0]))  # scale 2, integers 0 to 3, zero at 2 (1.5, to even)


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_what_is_not_finite_or_empty_leaves_the_range(worst: float) -> None:
    one = ActivationRange(bits=8)
    one.observe(torch.tensor([0.0, 1.0]))
    update_ranges([one])
    one.observe(torch.tensor([0.0, worst]))
    update_ranges([one])
    one.observe(torch.empty(0))
    update_ranges([one])
    assert (one.low.item(), one.high.item()) == (0.0, 1.0)


def test_all_layers_are_reduced_over_ranks_at_once() -> None:
    calls: list[Tensor] = []

    def with_another_rank(seen: Tensor) -> Tensor:
        calls.append(seen)
        return torch.maximum(seen, torch.tensor([[4.0, 1.0], [0.0, 9.0]]))  # of ranges -4 to 1, and 0 to 9

    ranges = [ActivationRange(8), ActivationRange(8)]
    for one in ranges:
        one.observe(torch.tensor([-1.0, 2.0]))
    update_ranges(ranges, with_another_rank)
    update_ranges([], with_another_rank)
    assert len(calls) == 1
    assert [(one.low.item(), one.high.item()) for one in ranges] == [(-4.0, 2.0), (-1.0, 9.0)]


def test_a_restored_range_rounds_as_before() -> None:
    one, other = ActivationRange(bits=4), ActivationRange(bits=4)
    one.observe(torch.tensor([-1.0, 2.0]))
    update_ranges([one])
    restore_range(other, -1.0, 2.0)
    x = torch.linspace(-2, 3, 50)
    torch.testing.assert_close(other(x), one(x), **EXACT)
    assert not torch.equal(other(x), x)


@pytest.mark.parametrize("values", [[-1.3, 0.0, 0.77, 2.2], [1.0, 1.5, 4.0], [-4.0, -1.0], [0.0, 0.0]])
def test_the_grid_of_a_tensor_holds_zero_and_its_ends(values: list[float]) -> None:
    low, high = min(0.0, *values), max(0.0, *values)
    scale = max((high - low) / 15, torch.finfo(torch.float32).eps)
    zero = round(-low / scale)
    by_hand = [(min(max(round(value / scale) + zero, 0), 15) - zero) * scale for value in values]
    rounded = fake_quantize_activation(torch.tensor(values), bits=4)
    torch.testing.assert_close(rounded, torch.tensor(by_hand), rtol=1e-5, atol=1e-6)
    assert fake_quantize_activation(torch.empty(0, 3)).shape == (0, 3)


def test_a_range_is_not_known_before_it_is_finite() -> None:
    one, other = ActivationRange(bits=8), ActivationRange(bits=8)
    one.observe(torch.tensor([0.0, torch.inf]))
    other.observe(torch.tensor([0.0, 1.0]))
    update_ranges([one, other])
    assert (one.known, other.known) == (False, True)
    values = torch.tensor([0.3, 0.7])
    torch.testing.assert_close(one(values), values, rtol=0, atol=0)
    one.observe(torch.tensor([0.0, 255.0]))
    update_ranges([one, other])
    assert one.known
    torch.testing.assert_close(one(values), torch.tensor([0.0, 1.0]))
