"""The class of a checkpointed module: exact over several steps, and in no one's way."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.checkpoint_policy import checked_policy
from lightning_speedkit.memory.recomputation import Recomputed, plain_class, recomputed_class


class Counter(nn.Module):
    """Counts its calls in two buffers, one written in place and one replaced, and its output depends on both."""

    in_place: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.in_place.add_(1.0)
            self.replaced = self.replaced + 1.0
        return x * self.in_place.clone() / self.replaced + 0.125 * x * self.in_place.clone()


class Block(nn.Module):
    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.inner = inner
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.inner(self.first(x))))


class OwnBatchNorm(nn.Module):
    """Calls batch norm itself, on buffers of its own names."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class ThroughData(nn.Module):
    """Writes its buffers in ways that do not raise their version: a codebook, a counter, a flag; small ones."""

    book: Tensor
    seen: Tensor
    warm: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("book", torch.ones(width, width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("warm", torch.zeros(1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.add_(1)
        self.book.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        factor = self.book.sum(0) / self.seen + self.warm
        self.warm.data.fill_(True)
        return torch.tanh(x * factor)


class Large(nn.Module):
    """Writes to a buffer of more than 1 MiB in place, and keeps a constant one."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(600, 600))
        self.register_buffer("mask", torch.ones(500, 700))

    def forward(self, x: Tensor) -> Tensor:
        self.table.add_(1.0)
        return torch.tanh(x * self.table[0, 0].clone() * self.mask[0, 0])


class Late(nn.Module):
    """Has its buffer from the first forward on: one that was None, or one that was not there."""

    cache: Tensor | None

    def __init__(self, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(x.shape[-1]), persistent=False)
        elif self.cache is None:
            self.cache = torch.ones(x.shape[-1])
        assert self.cache is not None
        self.cache.mul_(1.5)
        return torch.tanh(x * self.cache.clone())


class Comes(nn.Module):
    """Has its buffer in every second forward only."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "flag"):
            del self.flag
            return torch.tanh(x)
        self.register_buffer("flag", torch.ones(()))
        return torch.tanh(2.0 * x)


class Frozen(nn.Module):
    """Holds a buffer that was made in inference mode."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale.clone())


class Draws(nn.Module):
    """Draws a factor from outside torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.draw())


class Drops(nn.Module):
    """Leaves itself out at random."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + torch.tanh(self.layer(x))


INNER: dict[str, Callable[[int], nn.Module]] = {
    "nothing": lambda width: nn.Identity(),
    "dropout": lambda width: nn.Dropout(0.3),
    "batch norm": lambda width: nn.BatchNorm1d(width),
    "batch norm, cumulative": lambda width: nn.BatchNorm1d(width, momentum=None),
    "batch norm, frozen": lambda width: nn.BatchNorm1d(width).eval(),
    "batch norm and dropout": lambda width: nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.3)),
    "batch norm of one's own": OwnBatchNorm,
    "spectral norm": lambda width: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
    "weight norm": lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    "spectral norm by hooks": lambda width: nn.utils.spectral_norm(nn.Linear(width, width)),
    "a counter": lambda width: Counter(),
    "rrelu": lambda width: nn.RReLU(),
    "buffers written through .data": ThroughData,
    "a large buffer": lambda width: Large(),
    "a buffer that is None at first": lambda width: Late(True),
    "a buffer that is registered in the forward": lambda width: Late(False),
    "a buffer that comes and goes": lambda width: Comes(),
    "a buffer made in inference mode": lambda width: Frozen(),
    "lazy batch norm": lambda width: nn.LazyBatchNorm1d(),
    "scripted batch norm": lambda width: torch.jit.script(nn.BatchNorm1d(width)),
    "python's random": lambda width: Draws(lambda: random.uniform(0.5, 1.5)),
    "python's gauss": lambda width: Draws(lambda: random.gauss(1.0, 0.1)),
    "numpy's random": lambda width: Draws(lambda: float(numpy.random.uniform(0.5, 1.5))),
    "numpy's normal": lambda width: Draws(lambda: float(numpy.random.randn())),  # every second one comes from a cache
    "layers dropped at random": Drops,
}


def _checkpoint(model: nn.Module, kind: type[nn.Module], policy: str = "full") -> None:
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = recomputed_class(kind, checked_policy(policy))


def _train(model: nn.Module, steps: int = 4, backward: Callable[[Tensor], None] = Tensor.backward) -> list[Tensor]:
    """A plain loop; returns every loss and gradient, and at last all parameters, buffers and random states."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        backward(loss)
        seen.append(loss.detach())
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    seen += [value.clone() for value in model.state_dict().values()]
    return [*seen, torch.get_rng_state(), torch.tensor([random.gauss(0.0, 1.0), numpy.random.randn()])]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _model(inner: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(4, INNER[inner](8)), Block(4, INNER[inner](8)), nn.Linear(4, 1))


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("inner", INNER)
def test_training_is_the_same_bit_for_bit(inner: str, policy: str) -> None:
    plain, checkpointed = _model(inner), _model(inner)
    _checkpoint(checkpointed, Block, policy)
    assert _equal(_train(plain), _train(checkpointed))


def test_the_comparison_sees_what_plain_checkpointing_gets_wrong() -> None:
    class Naive(Block):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return result

    cases = ("batch norm", "spectral norm", "a counter", "buffers written through .data", "a large buffer")
    cases += ("a buffer that is None at first", "a buffer that comes and goes", "lazy batch norm")
    for inner in (*cases, "scripted batch norm", "python's random", "python's gauss", "numpy's random"):
        plain, naive = _model(inner), _model(inner)
        for module in naive:
            if isinstance(module, Block):
                module.__class__ = Naive
        assert not _equal(_train(plain), _train(naive)), inner


def test_batch_norm_advances_once_per_batch() -> None:
    model = _model("batch norm")
    _checkpoint(model, Block)
    _train(model, steps=3)
    assert model.get_submodule("0.inner").num_batches_tracked == 3


def _alive(shape: tuple[int, ...]) -> int:
    return sum(type(one) is Tensor and one.shape == shape for one in gc.get_objects())


def test_of_large_buffers_only_those_that_the_forward_wrote_are_kept() -> None:
    block = Block(4, Large())
    block.__class__ = recomputed_class(Block)
    gc.collect()
    before = _alive((600, 600)), _alive((500, 700))
    loss = block(torch.ones(2, 4)).sum()
    assert (_alive((600, 600)), _alive((500, 700))) == (before[0] + 1, before[1])
    loss.backward()
    del loss
    assert (_alive((600, 600)), _alive((500, 700))) == before


def test_another_bit_generator_of_numpy_s_is_left_alone() -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(0))
    try:
        plain, checkpointed = _model("dropout"), _model("dropout")
        _checkpoint(checkpointed, Block)
        x = torch.ones(2, 4)
        for model in (plain, checkpointed):
            torch.manual_seed(0)
            model(x).sum().backward()
        assert _equal([p.grad for p in plain.parameters()], [p.grad for p in checkpointed.parameters()])
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.parametrize(
    "inner", ["dropout", "batch norm", "a counter", "buffers written through .data", "numpy's normal"]
)
def test_a_second_backward_through_the_same_graph(inner: str) -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    plain, checkpointed = _model(inner), _model(inner)
    _checkpoint(checkpointed, Block)
    assert _equal(_train(plain, backward=twice), _train(checkpointed, backward=twice))


def test_a_module_that_runs_several_times_in_one_forward() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(4, nn.Sequential(Counter(), nn.Dropout(0.3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.block(x)))

    torch.manual_seed(0)
    plain = Loop()
    checkpointed = copy.deepcopy(plain)
    _checkpoint(checkpointed, Block)
    assert _equal(_train(plain), _train(checkpointed))


def test_a_buffer_that_two_layers_share() -> None:
    torch.manual_seed(0)
    one, two = Counter(), Counter()
    two.in_place = one.in_place
    plain = nn.Sequential(Block(4, nn.Sequential(one, two)))
    checkpointed = copy.deepcopy(plain)
    _checkpoint(checkpointed, Block)
    assert _equal(_train(plain), _train(checkpointed))


def test_a_forward_that_fails_leaves_the_buffers_as_the_plain_one_does() -> None:
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.inner(self.first(x))
            raise RuntimeError("stop")

    torch.manual_seed(0)
    model = nn.Sequential(Failing(4, nn.BatchNorm1d(8)))
    _checkpoint(model, Failing)
    with pytest.raises(RuntimeError, match="stop"):
        model(torch.ones(2, 4))
    assert model.get_submodule("0.inner").num_batches_tracked == 1


def test_a_recomputation_that_fails_puts_the_buffers_back() -> None:
    class FailsTheSecondTime(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.inner(self.first(x))
            if self.calls > 1:
                raise RuntimeError("stop")
            return self.second(y)

    model = nn.Sequential(FailsTheSecondTime(4, nn.BatchNorm1d(8)))
    _checkpoint(model, FailsTheSecondTime)
    norm = model.get_submodule("0.inner")
    before = norm.running_mean
    loss = model(torch.randn(8, 4)).sum()
    mean = norm.running_mean.clone()
    with pytest.raises(RuntimeError, match="stop"):
        loss.backward()
    assert norm.running_mean is before
    assert torch.equal(norm.running_mean, mean)
    assert norm.num_batches_tracked == 1


class Many(nn.Module):
    """Takes tensors by position and by keyword, some of them named like options of torch's checkpoint, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        pair: tuple[Tensor, float],
        mode: str = "add",
        *,
        debug: Tensor | None = None,
        use_reentrant: float = 1.0,
        context_fn: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], None]:
        y = self.linear(x) * pair[0] * pair[1] * use_reentrant
        if mode == "add" and debug is not None:
            y = y + debug.sigmoid()
        for value in (context_fn or {}).values():
            y = y * value
        return y, {"half": y / 2}, None


def test_keyword_arguments_nested_arguments_and_several_outputs() -> None:
    torch.manual_seed(0)
    plain = Many()
    checkpointed = copy.deepcopy(plain)
    checkpointed.__class__ = recomputed_class(Many)
    results = []
    for module in (plain, checkpointed):
        torch.manual_seed(1)
        tensors = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
        x, scale, debug, factor = tensors
        y, more, nothing = module(
            x, (scale, 2.0), debug=debug, use_reentrant=3.0, context_fn={"factor": factor}, mode="add"
        )
        assert nothing is None
        (y.square().sum() + more["half"].sum()).backward()
        results.append([y, more["half"], *(t.grad for t in (*tensors, *module.parameters()))])
    assert _equal(*results)


class Cell(nn.Module):
    """Takes its state in a container, and is one of several things that can happen to that container."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, state: Any, *, more: Any = None) -> Any:
        if self.how == "the block appends":
            y = torch.tanh(self.linear(sum(state)))
            state.append(y)
            return y
        y = torch.tanh(self.linear((state or more["in"][0])["x"]))
        if self.how == "the block updates":
            state["x"] = state["x"] + y
        return y


class Chain(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.cells = nn.ModuleList([Cell(how) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if self.how == "the block appends":
            features = [x]
            for cell in self.cells:
                cell(features)
            return torch.stack(features).sum(0)
        state = {"x": x}
        for cell in self.cells:
            if self.how == "the caller updates":
                state["x"] = state["x"] + cell(state)
            elif self.how == "the caller updates, deep in a keyword":
                state["x"] = state["x"] + cell(None, more={"in": [state]})
            elif self.how == "the caller empties":
                y = cell(state)
                state.clear()
                state["x"] = y
            else:
                cell(state)
        return state["x"]


CHANGES = (
    "the caller updates",
    "the caller updates, deep in a keyword",
    "the caller empties",
    "the block updates",
    "the block appends",
)


@pytest.mark.parametrize("how", CHANGES)
def test_a_container_that_changes_between_forward_and_backward(how: str) -> None:
    torch.manual_seed(0)
    plain = Chain(how)
    checkpointed = copy.deepcopy(plain)
    _checkpoint(checkpointed, Cell)
    assert _equal(_train(plain), _train(checkpointed))


@dataclass
class Holder:
    held: Any


@pytest.mark.parametrize(
    "wrap", [lambda x: {"x": x}, lambda x: [x], lambda x: ({"x": [x]},), lambda x: Holder({"x": [x]})]
)
def test_a_tensor_in_a_container_that_is_overwritten_is_an_error(wrap: Callable[[Tensor], Any]) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, nested: Any) -> Tensor:
            nested = nested.held if isinstance(nested, Holder) else nested
            while not isinstance(nested, Tensor):
                nested = nested["x"] if isinstance(nested, dict) else nested[0]
            return self.linear(torch.relu(nested))

    module = First()
    module.__class__ = recomputed_class(First)
    x = torch.ones(2, 4, requires_grad=True) * 1.0
    loss = module(wrap(x)).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_torch_is_told_on_which_device_to_keep_the_random_state() -> None:
    # It looks at the arguments, of which none may be a tensor that it sees.
    class Noise(nn.Linear):
        def forward(self, size: Any) -> Tensor:
            return super().forward(torch.ones(*size, device=self.weight.device))

    module = Noise(4, 4, device="meta")
    module.__class__ = recomputed_class(Noise)
    with patch("lightning_speedkit.memory.recomputation.checkpoint") as spy:
        module(range(2, 5, 2))
        module(torch.ones(2, device="meta"))
    seen = [[one.device.type for one in call.args[1:] if isinstance(one, Tensor)] for call in spy.call_args_list]
    assert seen == [["meta"], ["meta"]]


def test_a_list_that_gathers_the_outputs_is_freed() -> None:
    cell = Cell("the block appends")
    cell.__class__ = recomputed_class(Cell)
    gc.collect()
    gc.disable()
    try:
        features = [torch.ones(2, 4)]
        output = weakref.ref(cell(features))
        assert output() is features[1]
        del features
        assert output() is None
    finally:
        gc.enable()


def _steps(block: Block) -> None:
    torch.optim.SGD(block.parameters(), lr=0.1).step()


def _writes_a_bias(block: Block) -> None:
    with torch.no_grad():
        block.first.bias.add_(1.0)  # which the plain backward does not need, but the relu of a second run does


def _replaces(block: Block) -> None:
    block.second.weight = nn.Parameter(torch.zeros(4, 8))


def _writes_a_frozen_one(block: Block) -> None:
    block.first.weight.requires_grad_(False).mul_(2.0)


@pytest.mark.parametrize("change", [_steps, _writes_a_bias, _replaces, _writes_a_frozen_one])
def test_a_parameter_that_changes_between_forward_and_backward_is_an_error(change: Callable[[Block], None]) -> None:
    block = Block(4, nn.Dropout(0.3))
    block.__class__ = recomputed_class(Block)
    loss = block(torch.ones(2, 4, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    gradient = block.first.weight.grad
    assert gradient is not None
    before = gradient.clone()
    change(block)
    with pytest.raises(RuntimeError, match=r"parameter '(weight|bias)' of Linear .* not what it was"):
        loss.backward()
    assert torch.equal(gradient, before)


def test_parameters_of_a_functional_call_are_an_error_and_not_a_wrong_gradient() -> None:
    model = _model("nothing")
    given = {name: (2.0 * value.detach()).requires_grad_() for name, value in model.named_parameters()}
    x = torch.ones(2, 4)
    torch.func.functional_call(model, given, (x,)).sum().backward()
    assert given["0.first.weight"].grad is not None
    _checkpoint(model, Block)
    loss = torch.func.functional_call(model, given, (x,)).sum()
    with pytest.raises(RuntimeError, match="functional_call"):
        loss.backward()


def test_steps_that_are_taken_in_the_backward() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        for parameter in model.parameters():
            stepper = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, stepper=stepper: (stepper.step(), None)[1])
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
        return [value.clone() for value in model.state_dict().values()]

    plain, checkpointed = _model("batch norm and dropout"), _model("batch norm and dropout")
    _checkpoint(checkpointed, Block)
    assert _equal(train(plain), train(checkpointed))


def test_inputs_that_need_no_gradient_still_give_gradients_to_the_parameters() -> None:
    block = Block(4, nn.Identity())
    block.__class__ = recomputed_class(Block)
    block(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in block.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_same_in_the_recomputation(dtype: torch.dtype) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()  # outside autocast, as Lightning does
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, checkpointed = _model("batch norm and dropout"), _model("batch norm and dropout")
    _checkpoint(checkpointed, Block)
    assert _equal(run(plain), run(checkpointed))


def _saved_bytes(model: nn.Module, x: Tensor) -> int:
    """The bytes that autograd keeps between forward and backward, without the parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x).sum()
    result.backward()
    return sum(kept.values())


def test_less_is_kept_for_the_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(16, nn.Identity()) for _ in range(6)))
    checkpointed = copy.deepcopy(plain)
    _checkpoint(checkpointed, Block)
    x = torch.randn(32, 16)
    assert _saved_bytes(plain, x) == 32 * (6 * (16 + 32) + 0) * 4  # a block's input and its relu, float32
    assert _saved_bytes(checkpointed, x) == 32 * 6 * 16 * 4  # a block's input only


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_outside_training_the_forward_runs_once_and_directly(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("checkpointed outside training")

    monkeypatch.setattr("lightning_speedkit.memory.recomputation.checkpoint", never)
    model = _model("batch norm and dropout")
    _checkpoint(model, Block)
    if mode == "eval":
        model.eval()(torch.ones(2, 4)).sum().backward()
        return
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        model(torch.ones(2, 4))
    with pytest.raises(AssertionError, match="outside training"):  # and the check can fail
        model(torch.ones(2, 4))


def test_hooks_of_the_module_run_once_per_forward() -> None:
    block = Block(4, nn.BatchNorm1d(8))
    block.__class__ = recomputed_class(Block)
    calls: list[str] = []
    block.register_forward_pre_hook(lambda module, args: calls.append("before"))
    block.register_forward_hook(lambda module, args, output: calls.append("after"))
    block.register_full_backward_hook(lambda module, gi, go: calls.append("backward"))
    block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert calls == ["before", "after", "backward"]


def test_an_input_that_the_module_overwrites_is_an_error_and_not_a_wrong_gradient() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2.0))

    module = Overwrites()
    module.__class__ = recomputed_class(Overwrites)
    loss = module(torch.ones(2, 4)).square().sum()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_names_keys_and_looks_do_not_change() -> None:
    model = _model("batch norm")
    before = ([n for n, _ in model.named_parameters()], list(model.state_dict()), repr(model))
    _checkpoint(model, Block)
    assert ([n for n, _ in model.named_parameters()], list(model.state_dict()), repr(model)) == before
    block = model.get_submodule("0")
    assert isinstance(block, Block)
    assert isinstance(block, Recomputed)
    assert inspect.signature(block.forward) == inspect.signature(Block(4, nn.Identity()).forward)
    assert (type(block).__name__, type(block).__qualname__, type(block).__module__) == ("Block", "Block", __name__)


def _through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": _through_torch_save,
    **{f"pickle {p}": lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)},
}


class OwnCopies(Block):
    """Copies itself, in the way of torch's parametrized modules."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopies:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __copy__(self) -> OwnCopies:
        twin = type(self).__new__(type(self))
        twin.__dict__ = dict(self.__dict__)
        return twin


_PARAMETRIZED = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("original", "make"),
    [
        (Block(4, nn.Identity()), copy.copy),
        (OwnCopies(4, nn.Identity()), copy.copy),
        (OwnCopies(4, nn.Identity()), copy.deepcopy),
        (_PARAMETRIZED, copy.deepcopy),  # torch refuses a shallow copy of it
    ],
)
def test_a_copy_by_the_class_s_own_method_is_plain_too(original: nn.Module, make: Callable[[Any], Any]) -> None:
    module, plain = copy.deepcopy(original), type(original)
    module.__class__ = recomputed_class(plain)
    twin = make(module)
    assert type(twin) is plain
    assert isinstance(module, Recomputed)
    assert torch.equal(twin(torch.ones(2, 4)), module(torch.ones(2, 4)))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_a_plain_model_with_weights_of_its_own(how: str) -> None:
    model = _model("batch norm")
    _checkpoint(model, Block)
    twin = COPIES[how](model)
    assert not any(isinstance(module, Recomputed) for module in twin.modules())
    assert isinstance(model.get_submodule("0"), Recomputed)
    assert type(twin.get_submodule("0")) is Block
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.ones(2, 4)
    assert torch.equal(model.eval()(x), torch.zeros(2, 1))
    assert not torch.equal(twin.eval()(x), torch.zeros(2, 1))
    assert _equal(_train(twin.train()), _train(_model("batch norm")))


def test_an_average_of_the_weights_is_kept_of_the_plain_model() -> None:
    plain, checkpointed = _model("dropout"), _model("dropout")
    _checkpoint(checkpointed, Block)
    averages = []
    for model in (plain, checkpointed):
        average = torch.optim.swa_utils.AveragedModel(model)
        _train(model)
        average.update_parameters(model)
        _train(model)
        average.update_parameters(model)
        averages.append(list(average.state_dict().values()))
    assert _equal(*averages)


def test_a_class_that_registers_its_subclasses_sees_none() -> None:
    registered: list[str] = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, key: str) -> None:  # a required keyword, which nobody could give here
            registered.append(key)

    layer = Registered(2, 2)
    layer.__class__ = recomputed_class(Registered)
    assert isinstance(layer, Registered)
    assert registered == []


def test_classes_are_made_once_and_not_kept_alive() -> None:
    class Local(nn.Linear):
        pass

    subclass = recomputed_class(Local)
    assert recomputed_class(Local) is subclass
    assert plain_class(subclass) is Local
    kept = weakref.ref(subclass)
    del subclass
    gc.collect()
    assert kept() is None


class Odd(nn.Linear):
    """Pickles through a reduce of its own."""

    def __reduce__(self) -> Any:
        return (self.__class__, (self.in_features, self.out_features), self.__dict__.copy())


def test_a_reduce_of_the_module_s_own_is_respected() -> None:
    layer = Odd(2, 3)
    layer.__class__ = recomputed_class(Odd)
    twin = pickle.loads(pickle.dumps(layer))
    assert type(twin) is Odd
    assert torch.equal(twin.weight, layer.weight)


@pytest.mark.parametrize("inner", ["nothing", "batch norm"])
def test_under_torch_compile(inner: str) -> None:
    plain, checkpointed = _model(inner), _model(inner)
    _checkpoint(checkpointed, Block)
    compiled = torch.compile(checkpointed, backend="aot_eager")
    x = torch.randn(8, 4)
    losses = []
    for model in (plain, compiled):
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(plain.buffers(), checkpointed.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


@pytest.mark.parametrize("inner", ["nothing", "batch norm"])
def test_a_block_that_is_compiled_by_itself(inner: str) -> None:
    plain, checkpointed = _model(inner), _model(inner)
    for index in (0, 1):
        checkpointed[index] = torch.compile(checkpointed[index], backend="aot_eager")
    _checkpoint(checkpointed, Block)
    x = torch.randn(8, 4)
    for model in (plain, checkpointed):
        model(x).square().mean().backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(plain.buffers(), checkpointed.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()
