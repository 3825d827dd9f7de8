"""Whatever a trial does to the objects that were kept, they are as before afterwards."""

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

from lightning_speedkit.optimize.lr_range_kept import keeping


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


def test_random_states_are_as_before() -> None:
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


def test_attributes_can_be_replaced_for_a_time() -> None:
    model = nn.Linear(1, 1)
    with keeping() as keep:
        keep.replaced(model, "forward", len)
        keep.replaced(model, "in_features", 5)
        assert (model.in_features, model([1, 2])) == (5, 2)
    assert (model.in_features, "forward" in vars(model)) == (1, False)
