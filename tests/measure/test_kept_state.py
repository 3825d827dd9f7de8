"""What a trial may change and what comes back, by value and by identity; as often as it is asked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_speedkit.measure.kept_state import GENERATORS, KeptState, keeping


def _draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def test_random_states_come_back_each_time() -> None:
    kept = KeptState()
    kept.random_states()
    first = _draws()
    for restore in (kept.restore, kept.restore, kept.finish):
        restore()
        assert _draws() == first


def test_a_module_after_training_is_the_module_before() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))
    module(torch.ones(4, 2)).sum().backward()
    module[0].bias.grad = None
    bias, gradient = module[0].bias, module[0].weight.grad
    values = {name: value.clone() for name, value in module.state_dict().items()}
    found = gradient.clone()
    kept = KeptState()
    kept.module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(2):
        module(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        module[2].p, module[1].mine = 0.7, "new"
        module.eval()
        kept.restore()
        torch.testing.assert_close(module.state_dict(), values, rtol=0, atol=0)
        assert module[0].bias is bias
        assert module[0].bias.grad is None
        assert module[0].weight.grad is gradient
        assert torch.equal(gradient, found)
        assert (module[2].p, hasattr(module[1], "mine")) == (0.1, False)
        assert all(part.training for part in module.modules())


class Owner:
    """Holds a thing of each kind."""

    def __init__(self) -> None:
        self.number, self.text, self.list = 3, "a", [1, [2]]
        self.dict, self.set, self.deque = {"a": [1]}, {1, 2}, deque([1, 2], maxlen=2)
        self.array, self.pair = numpy.arange(3), ([1], torch.zeros(2))
        self.expanded = torch.ones(1).expand(3)
        self.meta = torch.ones(2, device="meta")
        self.generators = [torch.Generator().manual_seed(5), random.Random(5), numpy.random.default_rng(5)]

    def change(self) -> None:
        self.number, self.text = 4, "b"
        self.list[1].append(9)  # type: ignore[union-attr]
        self.list.append(5)
        self.dict["a"].append(2)
        self.dict["b"] = []
        self.set.clear()
        self.deque.append(3)
        self.array[:] = 7
        self.pair[0].append(2)
        self.pair[1].add_(1)
        self.another = 1
        self.drawn()

    def drawn(self) -> list[float]:
        of_torch, of_python, of_numpy = self.generators
        return [torch.rand(1, generator=of_torch).item(), of_python.random(), float(of_numpy.random())]  # type: ignore[call-overload, union-attr, arg-type]


def test_attributes_and_their_contents_come_back_in_place() -> None:
    owner, twin, kept = Owner(), Owner(), KeptState()
    objects = dict(vars(owner))
    kept.attributes(owner)
    for _ in range(2):
        owner.change()
        kept.restore()
        assert vars(owner).keys() == objects.keys()
        assert all(vars(owner)[name] is value for name, value in objects.items())
        for name in ("number", "text", "list", "dict", "set", "deque"):
            assert getattr(owner, name) == getattr(twin, name), name
        assert owner.array.tolist() == [0, 1, 2]
        assert (owner.pair[0], owner.pair[1].tolist()) == ([1], [0.0, 0.0])
    assert owner.drawn() == twin.drawn()


def test_of_large_owners_only_the_contents_of_some_types() -> None:
    owner, twin, kept = Owner(), Owner(), KeptState()
    owner.generator = twin.generator = None  # type: ignore[attr-defined]
    owner.generator = torch.Generator().manual_seed(1)  # type: ignore[attr-defined]
    kept.attributes(owner, contents=GENERATORS, skip=("text",))
    torch.rand(3, generator=owner.generator)  # type: ignore[attr-defined]
    owner.change()
    kept.restore()
    assert owner.generator.initial_seed() == 1  # type: ignore[attr-defined]
    expected = torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(1, generator=owner.generator), expected)  # type: ignore[attr-defined]
    assert (owner.number, owner.text) == (3, "b")
    assert (owner.list, owner.array.tolist()) == ([1, [2, 9], 5], [7, 7, 7])  # not copied, so not put back


def test_a_thing_of_two_owners_is_one() -> None:
    one, other, kept = Owner(), Owner(), KeptState()
    one.list = other.list
    kept.attributes(one)
    kept.attributes(other)
    one.change()
    kept.restore()
    assert one.list is other.list
    assert other.list == [1, [2]]


def test_a_loader_is_where_it_was_and_its_workers_rest() -> None:
    data: Any = range(6)
    loader = DataLoader(data, 2, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)))
    expected = [batch.tolist() for batch in loader]
    loader.sampler.generator.manual_seed(3)  # type: ignore[attr-defined]
    kept, iterator = KeptState(), object()
    loader._iterator = iterator  # type: ignore[assignment]
    for _ in range(2):  # as where two parts of a run ask for it
        kept.loader(loader)
    assert loader._iterator is None
    list(loader)
    kept.finish()
    assert loader._iterator is iterator
    loader._iterator = None
    assert [batch.tolist() for batch in loader] == expected
    assert loader.dataset is data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_tensor_gets_its_values_back_also_where_autograd_looks(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.register_buffer("values", torch.ones(3, dtype=dtype))
    kept = KeptState()
    kept.module(module)
    values: Any = module.values
    version = values._version
    values.data.zero_()
    kept.restore()
    assert values.tolist() == [1, 1, 1]
    assert values._version == version  # a graph that has it is not disturbed


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.metric = nn.Linear(2, 2), nn.BatchNorm1d(2), MeanMetric()
        self.count, self.seen, self.last = 0, [torch.zeros(1)], torch.ones(2)
        self.kinds = {"set": {1}, "deque": deque([1]), "tuple": (["inside"],), "array": numpy.zeros(2)}
        self.generators = [torch.Generator(), random.Random(1), numpy.random.default_rng(1)]

    def draws(self) -> list[float]:
        one, two, three = self.generators
        return [torch.rand(1, generator=one).item(), two.random(), three.random()]

    def spoil(self) -> None:
        """Trains, and changes every kind of attribute in place and by name."""
        self.norm(self.linear(torch.randn(3, 2))).square().sum().backward()
        self.metric.update(5.0)
        self.eval()
        self.count += 1
        self.seen[0] += 1
        self.seen.append(torch.ones(1))
        self.last *= 2
        self.last = self.last + 1
        self.kinds["set"].add(2)
        self.kinds["deque"].append(2)
        self.kinds["tuple"][0].append("more")
        self.kinds["array"] += 1
        self.kinds["new"] = 1
        self.new = 1
        self.norm.running_mean = torch.full((2,), 7.0)
        self.draws()
        del self.linear.bias
        self.linear.bias = None


def test_a_module_is_as_before() -> None:
    model, twin = _Model(), _Model()
    twin.load_state_dict(model.state_dict())
    model.linear.weight.grad = torch.full((2, 2), 3.0)
    objects = [model.linear.weight, model.linear.bias, model.norm.running_mean, model.last, model.seen]
    with pytest.raises(ZeroDivisionError):
        _spoil_and_fail(model)
    assert model.linear.weight.grad is not None
    assert torch.equal(model.linear.weight.grad, torch.full((2, 2), 3.0))
    after = [model.linear.weight, model.linear.bias, model.norm.running_mean, model.last, model.seen]
    assert all(a is b for a, b in zip(objects, after, strict=True))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert (model.count, model.seen, model.last.tolist(), model.training) == (0, [torch.zeros(1)], [1.0, 1.0], True)
    assert {**model.kinds, "array": None} == {**twin.kinds, "array": None}
    assert model.kinds["array"].tolist() == [0.0, 0.0]  # type: ignore[attr-defined]
    assert not hasattr(model, "new")
    assert (model.metric.weight.item(), model.metric.update_count) == (0.0, 0)
    assert model.draws() == twin.draws()


def _spoil_and_fail(model: _Model) -> None:
    with keeping() as keep:
        keep.random_states()
        keep.module(model)
        model.spoil()
        raise ZeroDivisionError


def test_an_optimizer_is_as_before_and_goes_on_alike() -> None:
    ends = []
    for tried in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()

        for _ in range(2):
            if tried:
                with keeping() as keep:
                    keep.module(model)
                    keep.attributes(optimizer)
                    optimizer.param_groups[0]["lr"].fill_(5.0)
                    optimizer.param_groups[0]["weight_decay"] = 0.5
                    step()
            step()
        ends.append([*model.parameters(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_random_states_are_as_before_after_a_with() -> None:
    draws = []
    for _ in range(2):
        with keeping() as keep:
            keep.random_states()
            draws.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]


class _Counts:
    """A loader with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 4:
            self.position += 1
            yield torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_loaders_are_where_they_were() -> None:
    data = TensorDataset(torch.arange(8.0))
    sampler = RandomSampler(data, generator=torch.Generator())
    plain, counts = DataLoader(data, sampler=sampler, generator=torch.Generator()), _Counts()
    next(iter(counts))
    orders = []
    for _ in range(2):
        with keeping() as keep:
            keep.loaders({"plain": plain, "counts": counts})
            orders.append([batch.item() for (batch,) in plain])
            assert len(list(counts)) == 3
    assert orders[0] == orders[1] != sorted(orders[0])
    assert counts.position == 1


def test_a_loader_that_gives_each_batch_once_is_refused() -> None:
    with pytest.raises(ValueError, match="gives each of them once"), keeping() as keep:
        keep.loader(iter([torch.ones(1)]))


def test_tensors_that_have_no_values_of_their_own_to_write_are_passed_over() -> None:
    module = nn.Module()
    module.lazy = nn.LazyLinear(2)
    with torch.inference_mode():
        module.inferred = torch.ones(2)
    module.meta, module.expanded = torch.ones(2, device="meta"), torch.ones(1).expand(3)
    objects = [module.lazy.weight, module.inferred, module.meta, module.expanded]
    with keeping() as keep:
        keep.module(module)
        module.inferred, module.meta, module.expanded = torch.zeros(2), torch.zeros(1), torch.zeros(3)
    after = [module.lazy.weight, module.inferred, module.meta, module.expanded]
    assert all(one is other for one, other in zip(after, objects, strict=True))
    assert (module.inferred.tolist(), module.expanded.tolist()) == ([1, 1], [1, 1, 1])


def test_attributes_can_be_replaced_for_a_time() -> None:
    model = nn.Linear(1, 1)
    with keeping() as keep:
        keep.replaced(model, "forward", len)
        keep.replaced(model, "in_features", 5)
        assert (model.in_features, model([1, 2])) == (5, 2)
    assert (model.in_features, "forward" in vars(model)) == (1, False)
