"""A trial run leaves everything as it was: values, objects, and random numbers."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.checkpoint_budget_state import as_found

_CPU = torch.device("cpu")


class Stateful(nn.Module):
    """Writes to one buffer in place, replaces another, fills one that was None, and registers one more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("counted", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(2))
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        self.counted += 1
        self.counted.data.mul_(2)  # a write that leaves no trace in the version
        self.replaced = self.replaced + 5
        self.empty = torch.ones(3)
        self.register_buffer("late", torch.ones(1), persistent=False)
        out: Tensor = self.inner(x)
        return out * torch.rand(()) * random.random() * float(numpy.random.rand())


def _draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back_also_after_an_error(fails: bool) -> None:
    model = Stateful()
    model.inner.weight.grad = gradient = torch.full((3, 3), 2.0)
    objects = [model.counted, model.replaced, *model.parameters()]
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = _draws()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    try:
        with as_found(model, _CPU):
            assert model.inner.weight.grad is None
            model(torch.ones(2, 3)).sum().backward()
            assert float(model.counted) == 2.0
            assert model.inner.weight.grad is not None
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert _draws() == expected
    assert all(a is b for a, b in zip([model.counted, model.replaced, *model.parameters()], objects, strict=True))
    assert (float(model.counted), model.replaced.tolist(), model.empty) == (0.0, [1.0, 1.0], None)
    assert list(model._buffers) == ["counted", "replaced", "empty"]
    assert model.inner.weight.grad is gradient
    assert torch.equal(gradient, torch.full((3, 3), 2.0))
    assert model.inner.bias.grad is None


def test_a_second_run_inside_accumulates_and_the_first_gradient_is_not_touched() -> None:
    layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    layer(x).sum().backward()
    with as_found(layer, _CPU):
        for _ in range(2):
            layer(x).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[6.0, 8.0]]
    assert layer.weight.grad.tolist() == [[3.0, 4.0]]
