"""The copy that is tried in place of the user's module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_speedkit.memory.memory_estimate_copy import (
    Precision,
    batch_for,
    checked_device,
    checked_precision,
    copy_for,
    distinct_bytes,
    leaves_no_trace,
)

CPU = torch.device("cpu")


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("fake", [True, False])
def test_tied_weights_stay_one_and_whole_numbers_stay_whole(fake: bool) -> None:
    twin = copy_for(_Tied(), checked_precision("bf16-true"), CPU, fake=fake).module
    assert twin.head.weight is twin.embedding.weight
    assert twin.head.weight.dtype is torch.bfloat16
    assert twin.count.dtype is torch.int64
    assert isinstance(twin.head.weight, FakeTensor) == fake
    assert distinct_bytes(twin.parameters()) == 10 * 4 * 2


def test_frozen_parameters_stay_frozen_and_gradients_are_not_taken_along() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    model.bias.grad = torch.ones(2)
    twin = copy_for(model, Precision(), CPU, fake=True).module
    assert not twin.weight.requires_grad
    assert twin.bias.requires_grad
    assert twin.bias.grad is None


def test_a_tensor_that_comes_twice_in_a_batch_is_one() -> None:
    copied = copy_for(nn.Linear(2, 2), Precision(), CPU, fake=True)
    tensor = torch.zeros(3, 2)
    with copied.mode:
        sent = batch_for({"a": tensor, "b": [tensor, "text", 3]}, Precision(), CPU, copied)
    assert sent["a"] is sent["b"][0]
    assert sent["b"][1:] == ["text", 3]


def test_a_lazy_module_is_told() -> None:
    with pytest.raises(ValueError, match="'weight' has no shape before the first forward"):
        copy_for(nn.LazyLinear(2), Precision(), CPU, fake=True)


def test_a_device_is_checked() -> None:
    assert checked_device("cpu:0").type == "cpu"
    with pytest.raises(ValueError, match="device='meta': torch finds no such device"):
        checked_device("meta")


def test_torchs_generator_is_the_real_one_inside_and_as_before_after() -> None:
    copied = copy_for(nn.Linear(2, 2), Precision(), CPU, fake=True)
    before = torch.get_rng_state()
    with leaves_no_trace(), copied.mode:
        inside = torch.get_rng_state()
        assert not isinstance(inside, FakeTensor)
        torch.set_rng_state(inside)
    assert torch.equal(inside, before)
    with pytest.raises(TypeError), leaves_no_trace():
        torch.rand(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)
