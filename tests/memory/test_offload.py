"""Saved tensors in host memory. Here, without a device, tensors on the CPU are told to be elsewhere and are copied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory import checkpoint_modules, offload
from lightning_speedkit.memory.offload import offload_saved_tensors


class Copies:
    """What is copied to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.alive: list[weakref.ref[Any]] = []
        monkeypatch.setattr(offload, "_is_on_host", lambda tensor: False)
        plain = offload._Copy.__init__

        def counted(copy: Any, flat: Tensor) -> None:
            plain(copy, flat)
            self.sizes.append(flat.numel() * flat.element_size())
            self.alive.append(weakref.ref(copy))

        monkeypatch.setattr(offload._Copy, "__init__", counted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


class Attention(nn.Module):
    """Saves slices, transposed and expanded views, one storage several times, and outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.dropout = nn.Linear(8, 24), nn.BatchNorm1d(5), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = self.dropout(torch.softmax(q @ k.transpose(1, 2), -1))
        scale = x[:, :1, :1].expand(-1, 5, 8)
        return x + torch.exp(weights @ v) * scale * x[..., ::2].repeat(1, 1, 2)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention(), nn.Linear(8, 1))


def _step(model: nn.Module, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, requires_grad=True)
    loss = model(x).square().mean()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [loss.detach(), *(one.grad for one in (x, *model.parameters())), *model.buffers(), torch.get_rng_state()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("min_bytes", [0, 200, 1 << 20])
def test_gradients_are_the_same_bit_for_bit(copies: Copies, min_bytes: int, backwards: int) -> None:
    plain, moved = _model(), _model()
    assert checkpoint_modules(moved, policy="offload", min_bytes=min_bytes) == ("0", "1")
    assert _equal(_step(plain, backwards), _step(moved, backwards))
    assert all(size >= min_bytes for size in copies.sizes)
    assert bool(copies.sizes) is (min_bytes < 1 << 20)


def test_on_a_cpu_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    monkeypatch.setattr(offload, "_is_on_host", lambda tensor: tensor.device.type == "cpu")
    model = _model()
    checkpoint_modules(model, policy="offload", min_bytes=0)
    assert _equal(_step(model), _step(_model()))
    assert copies.sizes == []


def test_a_storage_is_copied_once_and_the_parameters_not_at_all(copies: Copies) -> None:
    layer = nn.Linear(8, 8)
    with offload_saved_tensors(layer, 0):
        x = torch.randn(4, 8)
        y = layer(x)  # saves x, and the weight
        z = y.sin() + y.cos() + y.t().exp().t().sum()  # y twice, once transposed; exp saves its own output
    assert sorted(copies.sizes) == [4 * 8 * 4] * 3
    z.sum().backward()


def test_of_a_large_storage_only_the_part_that_is_saved(copies: Copies) -> None:
    large = torch.randn(100, 8)
    weight = torch.randn(2, 8, requires_grad=True)
    with offload_saved_tensors(nn.Identity(), 0):
        loss = (large[10:12] * weight).sum()
    assert copies.sizes == [2 * 8 * 4]
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, large[10:12])


def test_an_address_that_is_used_again_is_another_tensor(copies: Copies) -> None:
    weight = torch.ones(64, requires_grad=True)
    values = [float(number) for number in range(20)]
    with offload_saved_tensors(nn.Identity(), 0):
        parts = [(torch.full((64,), value) * weight).sum() for value in values]  # each tensor is freed after its turn
    assert len(copies.sizes) == 20
    for value, part in zip(values, parts, strict=True):
        weight.grad = None
        part.backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((64,), value))


def test_a_tensor_that_is_overwritten_after_it_was_copied_does_not_matter(copies: Copies) -> None:
    weight = torch.ones(4, requires_grad=True)
    x = torch.full((4,), 2.0)
    with offload_saved_tensors(nn.Identity(), 0):
        first = (x * weight).sum()
        x.fill_(3.0)
        second = (x * weight).sum()
    (first + second).backward()
    assert copies.sizes == [16, 16]
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((4,), 5.0))


def test_a_tensor_that_stays_and_is_overwritten_is_an_error_as_it_is_without() -> None:
    weight = torch.ones(4, requires_grad=True)
    x = torch.full((4,), 2.0)
    with offload_saved_tensors(nn.Identity()):
        loss = (x * weight).sum()
    x.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("change", [lambda p: p.mul_(2.0), lambda p: torch.optim.SGD([p], lr=1.0).step()])
def test_a_parameter_that_changes_is_an_error_as_it_is_without(copies: Copies, change: Callable[[Tensor], Any]) -> None:
    model = _model()
    checkpoint_modules(model, policy="offload", min_bytes=0)
    loss = model(torch.ones(3, 5, 8, requires_grad=True)).sum()
    weight = model.get_submodule("0.qkv").weight
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        change(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backward", [True, False])
def test_copies_end_with_the_graph(copies: Copies, backward: bool) -> None:
    model = _model()
    checkpoint_modules(model, policy="offload", min_bytes=0)
    gc.disable()
    try:
        loss = model(torch.ones(3, 5, 8)).sum()
        assert any(one() is not None for one in copies.alive)
        if backward:
            loss.backward()
        del loss
        assert [one() for one in copies.alive if one() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_outside_training_nothing_is_copied(copies: Copies, mode: str) -> None:
    model = _model()
    checkpoint_modules(model, policy="offload", min_bytes=0)
    if mode == "eval":
        model.eval()[0](torch.ones(3, 5, 8)).sum().backward()
    else:
        with torch.no_grad():
            model(torch.ones(3, 5, 8))
    assert copies.sizes == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.view_as_complex(torch.randn(4, 2)).conj(),
        lambda: torch.empty(0),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.randn(4, dtype=torch.complex64),
    ],
)
def test_tensors_of_other_kinds_come_back_as_they_were(copies: Copies, make: Callable[[], Tensor]) -> None:
    held = make()
    there = offload._unpack(offload._HostCopies(0, ()).pack(held))
    assert there.layout is held.layout
    assert there.is_conj() is held.is_conj()
    assert torch.equal(there.to_dense().resolve_conj(), held.to_dense().resolve_conj())
