"""Every kind of gradient is looked at, none is changed; and which fused kernels leave everything as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize.non_finite_gradients import can_skip_by_itself, has_non_finite_gradient, is_read_freely

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [None, NAN, INF, -INF])
@pytest.mark.parametrize("kinds", ["float32", "float64", "bfloat16", "float16", "float32 float64 bfloat16"])
def test_any_gradient_that_is_not_finite_is_found_and_all_are_left_as_they_are(kinds: str, bad: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(3, 2, generator=generator).to(getattr(torch, kind)) for kind in kinds.split()]
    if bad is not None:
        gradients[-1][2, 1] = bad
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    without_gradient = nn.Parameter(torch.ones(1))
    flag = has_non_finite_gradient(torch.optim.SGD([*parameters, without_gradient], lr=0.1))
    assert flag.item() == (0.0 if bad is None else 1.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
    assert has_non_finite_gradient(torch.optim.SGD([without_gradient], lr=0.1)).item() == 0.0


@pytest.mark.parametrize("bad", [None, NAN, INF])
def test_sparse_and_complex_gradients_are_looked_at(bad: float | None) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3, 1])).sum().backward()
    wave, empty = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Embedding(3, 2, sparse=True)
    wave.grad = torch.tensor([1 + 2j, 3 - 1j]).conj()
    empty(torch.tensor([], dtype=torch.long)).sum().backward()
    optimizer = torch.optim.SGD([table.weight, wave, empty.weight], lr=0.1)
    assert has_non_finite_gradient(optimizer).item() == 0.0
    torch.testing.assert_close(wave.grad, torch.tensor([1 - 2j, 3 + 1j]))
    if bad is not None:
        table.weight.grad._values()[2, 1] = bad
        assert has_non_finite_gradient(optimizer).item() == 1.0
        table.weight.grad = None
        wave.grad = torch.complex(torch.ones(2), torch.tensor([0.0, bad]))
        assert has_non_finite_gradient(optimizer).item() == 1.0


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), 0),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True), 0),
    ],
)
def test_a_kernel_that_skips_leaves_no_trace(make: Any, steps: int) -> None:
    """The oracle is the same optimizer without the bad step."""

    def run(skips: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = make([weight])
        for step in range(4):
            weight.grad = torch.full((3,), 1.0 + step)
            assert can_skip_by_itself(optimizer) is (step >= steps)
            if skips and step >= steps:
                weight.grad.fill_(NAN)
                optimizer.found_inf, optimizer.grad_scale = has_non_finite_gradient(optimizer), None
                optimizer.step()
                del optimizer.found_inf, optimizer.grad_scale
                weight.grad = torch.full((3,), 1.0 + step)
            optimizer.step()
        return weight.detach()

    assert torch.equal(run(True), run(False))


def test_an_optimizer_that_is_not_fused_skips_nothing() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert not can_skip_by_itself(torch.optim.SGD([weight], lr=0.1))
    assert is_read_freely(weight)
    assert not is_read_freely(weight.to("meta"))
