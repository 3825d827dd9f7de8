"""Counting of storages: sums worked out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes, measure_peak_bytes

_KB = 256  # float32 values


def test_views_count_once_and_what_was_there_does_not() -> None:
    there = torch.ones(4, _KB)
    with LiveBytes() as live:
        part = there[1:]
        part.add_(1)
        made = torch.cat([there, there])  # 8 KB
        views = [made.view(-1), made[0], made.t()]
        assert live.now == 8192
        del made
        assert live.now == 8192  # a view holds it
        del views
        assert (live.now, live.peak) == (0, 8192)
        twice = torch.ones(_KB) + torch.ones(_KB)  # three at once
        assert (live.now, twice.numel()) == (1024, _KB)
    assert live.peak == 8192


def test_the_gradients_of_parameters_do_not_count_once_they_are_there() -> None:
    layer = nn.Linear(100, 50, bias=False)  # 20,000 bytes of weights
    x = torch.ones(1, 100)
    kept: list[Tensor] = []

    def run() -> None:
        layer(x).sum().backward()
        kept.append(torch.ones(_KB * 8))  # 8 KB beside the gradient

    # At once: the gradient before it is accumulated, the result of the layer (200 bytes), its gradient (a view of 4
    # bytes), the loss (4 bytes) and the gradient of the loss.
    peak = measure_peak_bytes(layer, run, torch.device("cpu"))
    assert 20_000 <= peak <= 20_000 + 3 * 200 + 12
    assert layer.weight.grad is not None
    assert layer.weight._post_accumulate_grad_hooks is None or not layer.weight._post_accumulate_grad_hooks


def test_saved_tensors_live_until_their_backward() -> None:
    def run() -> None:
        x = torch.ones(_KB, requires_grad=True)  # 1 KB
        y = x
        for _ in range(5):
            y = y.tanh()  # each result is saved
        y.sum().backward()

    peak = measure_peak_bytes(nn.Identity(), run, torch.device("cpu"))
    assert 6 * 1024 <= peak <= 8 * 1024 + 8


@pytest.mark.parametrize(
    ("layer", "channels"),
    [
        (nn.Conv2d(32, 32, 3, padding=1), 32),
        (nn.Conv2d(16, 64, 1, bias=False), 16),
        (nn.Conv2d(64, 64, 3, 2, 1, groups=64), 64),
        (nn.Conv2d(32, 32, 3, padding=1).to(memory_format=torch.channels_last), 32),
    ],
)
def test_buffers_inside_a_convolution_count_as_the_allocator_counts_them(layer: nn.Conv2d, channels: int) -> None:
    x = torch.randn(16, channels, 24, 24, requires_grad=True)
    if not layer.weight.is_contiguous():
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn_like(layer(x))
    layer(x).backward(gradient)  # the gradients are there

    def run() -> None:
        y = layer(x)
        y.backward(gradient)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    allocated = max(itertools.accumulate(change for _, change in changes))
    assert measure_peak_bytes(layer, run, torch.device("cpu")) == pytest.approx(allocated, rel=0.05)
