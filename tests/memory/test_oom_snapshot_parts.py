"""What fills the memory, against bytes worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.oom_snapshot_parts import local_tensors, measure_parts, place_of_error


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(50)
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50, 20))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight
        raise MemoryError(f"no room for more than {logits.numel()}")


def _fails(net: Net, x: Tensor) -> MemoryError:
    try:
        net(x)
    except MemoryError as error:
        return error
    raise AssertionError("it does not fail")


def test_each_part_is_counted_once() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    (net.norm.weight.sum() + net.head.weight.sum()).backward()
    optimizer.step()
    net.twin = net.head.weight  # type: ignore[assignment]  # a storage twice
    parts = measure_parts(net, [optimizer])
    weights = 4 * (50 + 50 + 50 * 20)
    assert parts.parameters == weights
    assert parts.gradients == weights - 4 * 50  # the bias has none
    assert parts.optimizer_state == 2 * parts.gradients + 2 * 4  # and a count of steps for each of two
    assert parts.buffers == 2 * 4 * 50 + 8
    assert parts.fragmentation is None
    assert parts.largest[0].bytes >= 4000


def test_what_an_error_went_through_is_named_by_module() -> None:
    net, x = Net(), torch.ones(30_001, 50)
    error = _fails(net, x)
    parts = measure_parts(net, locals_=local_tensors(error, net), largest=50)  # other tests may have left tensors
    names = [(tensor.name, tensor.module, tensor.shape) for tensor in parts.largest]
    assert ("x", "head", (30_001, 50)) in names
    assert ("logits", "head", (30_001, 20)) in names
    assert parts.activations >= 4 * 30_001 * (50 + 50 + 20)
    place = place_of_error(error, net)
    assert place.startswith("head (Head.forward)")
    assert f"{__file__}:" in place


def test_on_a_device_the_rest_is_what_is_allocated_and_not_known() -> None:
    net = Net()
    parts = measure_parts(net, device=torch.device("cpu"), allocated_bytes=100_000, reserved_bytes=150_000)
    assert parts.activations == 100_000 - parts.parameters - parts.buffers
    assert parts.fragmentation == 50_000
    assert parts.total == 100_000
    other = measure_parts(net, device=torch.device("cuda", 1), allocated_bytes=7, reserved_bytes=7)
    assert (other.parameters, other.activations, other.largest) == (0, 7, ())


def test_a_tensor_made_of_others_has_their_bytes() -> None:
    class Quantized(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    net = nn.Module()
    made: Any = torch.zeros(100).as_subclass(Quantized)
    made.codes, made.scale = torch.zeros(100, dtype=torch.uint8), torch.zeros(2)
    net.register_buffer("made", made)
    assert measure_parts(net).buffers == 100 + 8


def test_lazy_and_sparse_ones_are_no_error() -> None:
    net = nn.Sequential(nn.LazyLinear(3))
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    assert measure_parts(net).parameters == 0
    with pytest.raises(AttributeError):
        measure_parts(None)  # type: ignore[arg-type]
