"""Kept outputs: which kernels run a second time, and that the gradients are those of a run that keeps everything."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_speedkit.memory import checkpoint_modules
from lightning_speedkit.memory.checkpoint_policy_kept import KeptOutputs

ATEN = torch.ops.aten


class Runs(TorchDispatchMode):
    """Counts the kernels that run; entered outside of what it counts, it sees only what is really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Transformer(nn.Module):
    """A block with attention and dropout; ``p`` of 0 in the attention lets a fused kernel compute it, also on CPUs."""

    def __init__(self, attention_p: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.attention_p = attention_p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_p)
        x = x + nn.functional.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2)
        return x + self.mlp(x)


class Convolutional(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(inplace), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Conv1d(8, 8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x.transpose(1, 2)).transpose(1, 2)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "fused attention": lambda: Transformer(0.0),
    "attention with dropout": lambda: Transformer(0.2),
    "convolution": lambda: Convolutional(False),
    "convolution that is overwritten": lambda: Convolutional(True),
    "linear that is overwritten": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
}


def _model(block: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(BLOCKS[block](), BLOCKS[block](), nn.Linear(8, 1))


def _gradients(model: nn.Module, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, requires_grad=True)
    loss = model(x).square().mean()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [loss.detach(), *(one.grad for one in (x, *model.parameters())), *model.buffers(), torch.get_rng_state()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


KEEPS: tuple[Any, ...] = (None, ["matmul", "batched-matmul"], ["aten._softmax", "aten.native_layer_norm", "aten.gelu"])


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_the_same_bit_for_bit(block: str, keep: Any, backwards: int) -> None:
    plain, selective = _model(block), _model(block)
    checkpoint_modules(selective, policy="selective", keep=keep)
    assert _equal(_gradients(plain, backwards), _gradients(selective, backwards))


@pytest.mark.parametrize("block", ["fused attention", "convolution"])
def test_under_autocast(block: str) -> None:
    results = []
    for keep in (False, True):
        model = _model(block)
        if keep:
            checkpoint_modules(model, policy="selective")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(1)
            loss = model(torch.ones(3, 5, 8)).float().square().mean()
        loss.backward()
        results.append([loss, *(one.grad for one in model.parameters())])
    assert _equal(*results)


def _kernels(block: str, **options: Any) -> Counter[str]:
    model = _model(block)
    if options:
        checkpoint_modules(model, **options)
    torch.manual_seed(1)
    with Runs() as runs:
        model(torch.ones(3, 5, 8)).sum().backward()
    return runs.count


def test_what_is_kept_is_not_computed_again_and_what_is_not_is() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    plain = _kernels("fused attention")
    full, selective = (_kernels("fused attention", policy=policy) for policy in ("full", "selective"))
    assert plain[attention] == 2
    assert (full[attention], full["addmm"] - plain["addmm"]) == (4, 2 * 3)  # a block's last product is not needed
    assert (selective[attention], selective["addmm"] - plain["addmm"]) == (2, 0)
    assert selective["native_layer_norm"] == full["native_layer_norm"] == 4
    assert selective["gelu"] == 4
    plain, selective = _kernels("convolution"), _kernels("convolution", policy="selective")
    assert (plain["convolution"], selective["convolution"]) == (4, 4)
    assert selective["native_batch_norm"] == 2 * plain["native_batch_norm"] > 0
    overwritten = _kernels("convolution that is overwritten", policy="selective")
    assert overwritten["convolution"] == 6  # of each block the first one again


class Noise(torch.autograd.Function):
    """Stands for a kernel that draws random numbers, as fused attention with dropout does on a GPU."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.ops.aten.rand_like.default(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Noise.apply(self.linear(x))
        return torch.tanh(self.dropout(torch.tanh(y)))


def test_a_kept_operation_that_draws_leaves_the_generator_where_it_left_it() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Noisy(), Noisy())
    selective = copy.deepcopy(plain)
    checkpoint_modules(selective, policy="selective", keep=["aten.rand_like"])
    assert _equal(_gradients(plain, 2), _gradients(selective, 2))


def test_the_comparison_sees_a_generator_that_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_speedkit.memory.checkpoint_policy_kept._set_random_state", lambda *_: None)
    torch.manual_seed(0)
    plain = nn.Sequential(Noisy(), Noisy())
    selective = copy.deepcopy(plain)
    checkpoint_modules(selective, policy="selective", keep=["aten.rand_like"])
    assert not _equal(_gradients(plain), _gradients(selective))


class Dropouts(nn.Module):
    """Draws in several ways, of several shapes and strides, and numbers of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.channels = nn.Linear(8, 8), nn.Dropout1d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(torch.tanh(self.linear(x)).transpose(1, 2), 0.3).transpose(1, 2)
        y = torch.tanh(y * torch.rand_like(y))
        y = torch.tanh(self.channels(y) + torch.randn(5, 8))
        return y * nn.functional.dropout(y[:, :3, :7].double(), 0.4).sum()


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_bits_of_dropout_are_drawn_once_and_are_the_same(backwards: int, policy: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Dropouts(), Dropouts())
    checkpointed = copy.deepcopy(plain)
    checkpoint_modules(checkpointed, policy=policy)
    for drawn in (6 * (1 + backwards), 6 * backwards):  # from the second forward on they are kept for one backward
        plain.zero_grad()
        checkpointed.zero_grad()
        expected = _gradients(plain, backwards)
        with Runs() as runs:
            assert _equal(expected, _gradients(checkpointed, backwards))
        assert runs.count["bernoulli_"] == drawn


def test_another_order_of_operations_takes_nothing_that_is_not_its_own() -> None:
    kept = KeptOutputs(frozenset({ATEN.mm.default, ATEN.bmm.default}))
    a, b = torch.full((2, 2), 2.0), torch.full((1, 2, 2), 3.0)
    with kept.recording():
        first = a @ a
    with kept.replaying():
        assert torch.equal(torch.bmm(b, b), torch.full((1, 2, 2), 18.0))
        assert torch.equal(a @ a, first)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_kept_after_the_graph_is_gone(backward: bool) -> None:
    kept: list[weakref.ref[Any]] = []

    class Watched(KeptOutputs):
        def __init__(self, operations: frozenset[Any], bits: bool) -> None:
            super().__init__(operations, bits)
            kept.append(weakref.ref(self))

    model = _model("fused attention")
    checkpoint_modules(model, policy="selective")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_speedkit.memory.recomputation.KeptOutputs", Watched)
        loss = model(torch.ones(3, 5, 8)).sum()
    assert len(kept) == 2
    assert all(one() is not None for one in kept)
    gc.disable()
    try:
        if backward:
            loss.backward()
        del loss
        assert [one() for one in kept] == [None, None]  # by counting references, without the garbage collector
    finally:
        gc.enable()
