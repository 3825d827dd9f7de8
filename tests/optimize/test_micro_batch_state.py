"""What a failed step leaves behind is undone: random numbers, buffers, metrics."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_speedkit.optimize.micro_batch_state import StateKeeper

CPU = torch.device("cpu")


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("constant", torch.zeros(2**19))  # these are above 1 MiB
        self.register_buffer("late", torch.zeros(2**19))
        self.register_buffer("exchanged", torch.zeros(2**19))

    def step(self, number: int) -> None:
        self.norm(torch.randn(4, 2))
        self.exchanged = torch.full((2**19,), float(number))
        if number > 2:
            self.late += 1


def _snapshot(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


def test_buffers_are_as_before_at_every_step_and_the_same_objects() -> None:
    module = _Buffers()
    keeper = StateKeeper(module, CPU)
    for number in (1, 2, 3, 4, 5):
        saved, before, objects = keeper.save(), _snapshot(module), list(module.buffers())
        module.step(number)
        if number == 3:
            continue  # that a large buffer changes is known only after the first step in which it does
        keeper.restore(saved)
        torch.testing.assert_close(_snapshot(module), before, rtol=0, atol=0)
        assert [id(b) for b in module.buffers()] == [id(b) for b in objects]
        module.step(number)
        assert not torch.equal(module.norm.running_mean, before[0])  # type: ignore[arg-type]


def test_what_never_changes_is_copied_once() -> None:
    module = _Buffers()
    keeper = StateKeeper(module, CPU)
    copied = []
    for number in (1, 2, 3, 4, 5):
        copied.append({name for _, name, _, _ in keeper.save().buffers})
        module.step(number)
    norm = {"running_mean", "running_var", "num_batches_tracked"}
    assert (
        copied
        == [{*norm, "constant", "late", "exchanged"}] + [{*norm, "exchanged"}] * 2 + [{*norm, "exchanged", "late"}] * 2
    )


def test_random_numbers_come_again() -> None:
    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]

    keeper = StateKeeper(nn.Identity(), CPU)
    saved = keeper.save()
    first = draw()
    keeper.restore(saved)
    assert draw() == first
    assert draw() != first


class _Keeps(Metric):
    """Keeps a list of what it saw, beside the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.seen.append(value)  # type: ignore[union-attr]
        self.total += value.sum()  # type: ignore[operator]

    def compute(self) -> Any:
        return torch.cat(self.seen), self.total  # type: ignore[arg-type]


def test_metrics_are_as_before_and_count_each_sample_once() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeps, self.mean = _Keeps(), MeanMetric()
            self.scores = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])

        def step(self, x: Tensor) -> None:
            self.keeps(x)
            self.mean.update(x)
            self.scores(x.long() % 3, (x.long() * 2) % 3)

    twice, once = Holder(), Holder()
    keeper = StateKeeper(twice, CPU)
    for x in torch.arange(24.0).split(8):
        saved = keeper.save()
        twice.step(x)
        keeper.restore(saved)
        twice.step(x)
        once.step(x)
    for a, b in ((twice.keeps, once.keeps), (twice.mean, once.mean), (twice.scores, once.scores)):
        torch.testing.assert_close(a.compute(), b.compute(), rtol=0, atol=0)
    assert twice.keeps.update_count == 3


def test_a_state_can_be_restored_more_than_once() -> None:
    metric = _Keeps()
    keeper = StateKeeper(nn.ModuleList([metric]), CPU)
    saved = keeper.save()
    for _ in range(3):
        metric.update(torch.ones(2))
        keeper.restore(saved)
        assert metric.total == 0
        assert metric.seen == []


def test_the_first_step_of_each_kind_may_change_a_large_buffer() -> None:
    module = _Buffers()
    keeper = StateKeeper(module, CPU)
    for _ in range(2):
        keeper.save("evaluation")
    saved = keeper.save("training")
    module.late += 1
    keeper.restore(saved)
    assert module.late.sum() == 0
    assert {name for _, name, _, _ in keeper.save("training").buffers} >= {"late"}


def test_the_buffers_of_a_scripted_module() -> None:
    norm = torch.jit.script(nn.BatchNorm1d(2))
    keeper = StateKeeper(nn.Sequential(norm), CPU)
    saved = keeper.save()
    norm(torch.randn(4, 2))
    assert norm.num_batches_tracked == 1
    keeper.restore(saved)
    assert norm.num_batches_tracked == 0


def test_buffers_that_come_and_go() -> None:
    module = _Buffers()
    module.register_buffer("cache", None)
    keeper = StateKeeper(module, CPU)
    before = keeper.save()
    module.cache = torch.ones(2)
    module.late = None  # type: ignore[assignment]
    del module.exchanged
    between = keeper.save()
    keeper.restore(before)
    assert module.cache is None
    assert [tuple(module.late.shape), tuple(module.exchanged.shape)] == [(2**19,), (2**19,)]
    assert "exchanged" in dict(module.named_buffers())
    keeper.restore(between)
    assert (module.late, module.cache.tolist()) == (None, [1, 1])  # type: ignore[union-attr]
