"""The parts that several benchmarks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import digits_networks
from benchmarks.digits_networks import accuracy, digits, median_seconds, train_epoch
from lightning_speedkit.demo.digits import load_digits, split_indices


def test_digits_are_those_of_the_split() -> None:
    images, labels = digits("test", 5)
    assert images.shape == (5, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    every, named = load_digits()
    assert (images[:, 0] * 16).tolist() == every[split_indices("test")[:5]].tolist()
    assert labels.tolist() == named[split_indices("test")[:5]].tolist()


def test_an_epoch_takes_each_batch_once() -> None:
    net = nn.Linear(2, 2)
    steps = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train_epoch(net.eval(), optimizer, torch.randn(7, 2), torch.zeros(7, dtype=torch.long), 3)
    assert (len(steps), net.training) == (3, True)


def test_the_middle_one_of_the_calls_counts_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([9.0] * 3 + [1.0, 5.0, 2.0] * 10)
    monkeypatch.setattr(digits_networks.time, "perf_counter", lambda: now[0])

    def net(batch: torch.Tensor) -> None:
        now[0] += next(took)

    assert median_seconds(net, torch.zeros(1), 3) == 2.0
    assert median_seconds(net, torch.zeros(1), 20) in (1.0, 2.0)  # five calls are the fewest, and four seconds the most
    assert len(list(took)) == 30 - 3 - 3 - 5


def test_accuracy() -> None:
    assert accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])) == 0.5
