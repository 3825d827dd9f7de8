"""What a trial may change and what comes back, by value and by identity; as often as it is asked."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_speedkit.memory.batch_size_kept import GENERATORS, Kept


def _draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def test_random_states_come_back_each_time() -> None:
    kept = Kept()
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
    kept = Kept()
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
    owner, twin, kept = Owner(), Owner(), Kept()
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
    owner, twin, kept = Owner(), Owner(), Kept()
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
    one, other, kept = Owner(), Owner(), Kept()
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
    kept, iterator = Kept(), object()
    loader._iterator = iterator  # type: ignore[assignment]
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
    kept = Kept()
    kept.module(module)
    values: Any = module.values
    version = values._version
    values.data.zero_()
    kept.restore()
    assert values.tolist() == [1, 1, 1]
    assert values._version == version  # a graph that has it is not disturbed
