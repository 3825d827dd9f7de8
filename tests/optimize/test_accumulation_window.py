"""The arithmetic, in plain loops, against one big batch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from lightning_speedkit.optimize import (
    AccumulationWindow,
    accumulation_window,
    samples_in,
    scale_gradients,
    weigh_backward,
)


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.booleans())
def test_micro_batches_of_any_sizes_equal_one_big_batch(sizes: list[int], raised: bool) -> None:
    x = torch.randn(sum(sizes), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, window = _net(), AccumulationWindow()
    for part in x.split(sizes):
        loss = model(part).square().sum() / max(len(part), 1)
        if raised:
            scale_gradients(model.parameters(), window.raise_reference(len(part)))
        weight = window.add(len(part))
        assert not raised or weight <= 1.0
        (loss * weight).backward()
    scale_gradients(model.parameters(), window.scale())
    whole = _net()
    whole(x).square().mean().backward()
    torch.testing.assert_close(_gradients(model), _gradients(whole), rtol=1e-12, atol=1e-14)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
)
def test_averaging_ranks_give_the_mean_over_all_samples(sizes: list[list[int]], divided_by: int) -> None:
    # The gradient of mean(w * x) is mean(x). Two ranks, scaled before the last backward, then averaged.
    total = sum(map(sum, sizes))
    windows = [AccumulationWindow(divided_by=divided_by) for _ in range(2)]
    sums, samples = [0.0, 0.0], iter(range(1, total + 1))
    true = sum(range(1, total + 1)) / total
    for index, row in enumerate(sizes):
        for rank, size in enumerate(row):
            mean = sum(next(samples) for _ in range(size)) / size / divided_by
            weight: Any = windows[rank].add(size)
            if index + 1 == len(sizes):
                scale = windows[rank].scale(torch.tensor(float(total), dtype=torch.float64), ranks=2)
                sums[rank] *= float(scale)
                weight = weight * scale
            sums[rank] += float(weight) * mean
    assert sum(sums) / 2 == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_equal_micro_batches_have_weights_of_exactly_one(size: int, factor: int) -> None:
    window = AccumulationWindow(divided_by=factor)
    assert [window.add(size) for _ in range(factor)] == [1.0] * factor
    assert window.scale() == 1.0
    assert window.scale(torch.tensor(2.0 * size * factor, dtype=torch.float64), ranks=2).item() == 1.0  # type: ignore[union-attr]
    assert (window.samples, window.batches) == (size * factor, factor)


def test_a_window_without_samples_gives_no_gradient_and_no_nan() -> None:
    window = AccumulationWindow(divided_by=2)
    assert [window.add(0), window.add(0)] == [0.0, 0.0]
    assert window.scale() == 0.0
    assert float(window.scale(torch.tensor(0.0), ranks=2)) == 0.0


@pytest.mark.parametrize("samples", [3, 2, 1, 0])
def test_the_reference_is_raised_by_more_samples_only(samples: int) -> None:
    window = AccumulationWindow()
    assert window.raise_reference(samples) == 1.0  # the first micro-batch sets it
    window.add(3)
    assert window.raise_reference(samples) == 1.0
    assert window.raise_reference(12) == 0.25
    assert window.add(12) == 1.0


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_any_whole_number_of_samples_gives_a_weight_in_double_precision(kind: Any) -> None:
    window = AccumulationWindow()
    assert window.add(kind(3)) == 1.0
    weight = window.add(kind(11))
    shrink = window.raise_reference(kind(7))
    raised = window.add(kind(5))
    assert [type(number) for number in (weight, shrink, raised)] == [float] * 3
    assert (weight, shrink, raised, window.samples) == (11 / 3, 3 / 7, 5 / 7, 19)


@pytest.mark.parametrize(
    ("samples", "error"),
    [(-1, ValueError), (torch.tensor(-1), ValueError), (2.0, TypeError), ("2", TypeError), (torch.ones(2), TypeError)],
)
def test_a_number_of_samples_that_makes_no_sense(samples: Any, error: type[Exception]) -> None:
    window = AccumulationWindow()
    for take in (window.add, window.raise_reference):
        with pytest.raises(error, match=r"A micro-batch cannot have .* samples"):
            take(samples)
    assert (window.samples, window.batches) == (0, 0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradients_of_every_kind_are_scaled_in_place(as_tensor: bool) -> None:
    double, single = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2))
    half, without = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(2))
    rows = nn.Embedding(4, 2, sparse=True)
    rows(torch.tensor([1, 3])).sum().backward()
    for parameter in (double, single, half):
        parameter.grad = torch.full_like(parameter, 3.0)
    kept = [p.grad for p in (double, single, half)]
    scale = torch.tensor(1.5, dtype=torch.float64) if as_tensor else 1.5
    assert scale_gradients([double, single, half, without, rows.weight], scale) == 4
    for parameter, gradient in zip((double, single, half), kept, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert gradient.dtype == parameter.dtype
        assert gradient.tolist() == [4.5, 4.5]
    assert rows.weight.grad is not None
    assert rows.weight.grad.is_sparse
    assert rows.weight.grad.to_dense().tolist() == [[0, 0], [1.5, 1.5], [0, 0], [1.5, 1.5]]
    assert without.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [2.0, torch.tensor(2.0, dtype=torch.float64)])
def test_a_weight_changes_the_gradient_and_not_the_loss(weight: float | Tensor, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 3.0], dtype=dtype, requires_grad=True)
    loss = x.mean()
    weigh_backward(loss, weight)
    loss.backward()
    assert loss.item() == 2.0
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [1.0, 1.0]


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class _Record:
    x: Tensor
    name: str


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(0, 2), 0),
        (torch.tensor(1.0), 1),
        ((torch.zeros(5), torch.zeros(5, 7)), 5),
        ([torch.zeros(5), 0.5, None], 5),
        (_Pair(torch.zeros(5), torch.zeros(5)), 5),
        (_Record(torch.zeros(5), "five"), 5),
        (OrderedDict(x=torch.zeros(5), names=["a"] * 5, scale=torch.tensor(2.0)), 5),
        ({"deep": {"er": (torch.zeros(5),)}}, 5),
        (pack_sequence([torch.zeros(2), torch.zeros(1)]), 2),
        ([torch.zeros(5), object()], 5),
        # as a detector gets them: pictures of three channels, and what is in each
        (
            (
                [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)],
                [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(3, 4)}],
            ),
            2,
        ),
    ],
)
def test_the_number_of_samples_is_found(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.zeros(5), torch.zeros(3)), "3 and 5"),
        ({"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(3)}, "1 and 2 and 3"),
        (["text", "only"], "no tensor"),
        (None, "no tensor"),
        ([], "no tensor"),
        (iter([torch.zeros(5)]), "no tensor"),
        (_Record, "no tensor"),
    ],
)
def test_a_number_that_cannot_be_told_is_an_error(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        samples_in(batch)


def test_a_number_on_another_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation_window, "_is_free_to_read", lambda tensor: False)
    window = AccumulationWindow(divided_by=2)
    weights: list[Any] = [window.add(torch.tensor([n])) for n in (0, 3, 11)]
    assert all(isinstance(weight, Tensor) and weight.dtype == torch.float64 for weight in weights)
    assert [weight.item() for weight in weights] == [0.0, 1.0, 11 / 3]
    assert float(window.raise_reference(torch.tensor(12))) == 0.25
    assert float(window.raise_reference(5)) == 1.0
    assert float(window.add(torch.tensor(6))) == 0.5
    assert float(window.scale()) == 2 * 12 / 20
    assert float(window.scale(torch.tensor(48.0), ranks=2)) == 1.0
    for wrong in (torch.ones(2).long(), torch.tensor(1.0)):
        with pytest.raises(TypeError, match="the number is a whole one"):
            window.add(wrong)
