"""The class of a checkpointed module: exact over several steps, and in no one's way."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
}


def _checkpoint(model: nn.Module, kind: type[nn.Module]) -> None:
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = recomputed_class(kind)


def _train(model: nn.Module, steps: int = 4, backward: Callable[[Tensor], None] = Tensor.backward) -> list[Tensor]:
    """A plain loop; returns every loss and gradient, and at last all parameters, buffers and the random state."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        backward(loss)
        seen.append(loss.detach())
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return [*seen, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _model(inner: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(4, INNER[inner](8)), Block(4, INNER[inner](8)), nn.Linear(4, 1))


@pytest.mark.parametrize("inner", INNER)
def test_training_is_the_same_bit_for_bit(inner: str) -> None:
    plain, checkpointed = _model(inner), _model(inner)
    _checkpoint(checkpointed, Block)
    assert _equal(_train(plain), _train(checkpointed))


def test_the_comparison_sees_what_plain_checkpointing_gets_wrong() -> None:
    class Naive(Block):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return result

    for inner in ("batch norm", "spectral norm", "a counter"):
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


@pytest.mark.parametrize("inner", ["dropout", "batch norm", "a counter"])
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
