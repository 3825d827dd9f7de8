"""The peak of a run: sums worked out by hand, and the record of the CPU's allocator."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_speedkit.memory import checkpoint_budget, checkpoint_budget_peak, checkpoint_modules
from lightning_speedkit.memory.checkpoint_budget_peak import measure_peak_bytes
from tests.memory.allocations import allocated_peak

_KB = 256  # float32 values
_CPU = torch.device("cpu")


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


LAYERS: list[tuple[nn.Module, int]] = [
    (nn.Conv2d(32, 32, 3, padding=1), 32),
    (nn.Conv2d(16, 64, 1, bias=False), 16),
    (nn.Conv2d(8, 12, 3), 8),
    (nn.Conv2d(64, 64, 3, 2, 1, groups=64), 64),
    (nn.Conv2d(32, 32, 3, padding=1).to(memory_format=torch.channels_last), 32),
]


def _step(layer: nn.Module, channels: int) -> Callable[[], None]:
    x = torch.randn(16, channels, 24, 24, requires_grad=True)
    if not layer.weight.is_contiguous():
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn_like(layer(x))

    def run() -> None:
        y = layer(x)
        y.backward(gradient)

    run()  # the gradients are there
    return run


@pytest.mark.parametrize(("layer", "channels"), LAYERS)
def test_buffers_inside_a_convolution_count_as_the_allocator_counts_them(layer: nn.Module, channels: int) -> None:
    run = _step(layer, channels)
    assert measure_peak_bytes(layer, run, _CPU) == allocated_peak(run)


@pytest.mark.parametrize(("layer", "channels"), LAYERS)
def test_where_a_profiler_is_on_they_are_reckoned(layer: nn.Module, channels: int) -> None:
    run = _step(layer, channels)
    with profile(activities=[ProfilerActivity.CPU]):
        counted = measure_peak_bytes(layer, run, _CPU)
    assert counted == pytest.approx(allocated_peak(run), rel=0.15)


def test_a_record_without_the_allocator_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_budget_peak, "_peak_of_record", lambda model, run: 0)
    assert measure_peak_bytes(nn.Identity(), lambda: torch.ones(_KB).tanh(), _CPU) == 2048


def test_gradients_that_are_freed_in_the_run_are_left_out_once() -> None:
    layer, x = nn.Linear(100, 500, bias=False), torch.ones(1, 100)  # 200,000 bytes of weights

    def run() -> None:
        for _ in range(4):
            layer(x).sum().backward()
            layer.weight.grad = None
        kept = torch.ones(100_000)  # 400,000 bytes
        del kept

    assert measure_peak_bytes(layer, run, _CPU) == 400_000


def test_what_dropout_drew_counts_from_the_first_trial_on() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.5), nn.Linear(512, 8)) for _ in "12"))
    x = torch.randn(64, 8)

    def run() -> None:
        model(x).sum().backward()

    plan = checkpoint_budget.plan_checkpoints(model, run, 0.99, ["0", "1"])
    checkpoint_modules(model, list(plan.paths))
    for _ in range(2):
        model.zero_grad()
        measured = measure_peak_bytes(model, run, _CPU)
    assert plan.paths
    assert plan.peak_bytes == measured


class _Cycle:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(64 * _KB)


@pytest.mark.parametrize("recorded", [True, False])
def test_garbage_from_before_that_is_freed_during_the_run_changes_nothing(recorded: bool) -> None:
    def run() -> None:
        first = torch.zeros(_KB)
        gc.collect()
        second = torch.zeros(_KB)
        assert first.numel() == second.numel()

    alone = measure_peak_bytes(nn.Identity(), run, _CPU)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if recorded else contextlib.nullcontext():
        _Cycle()
    assert measure_peak_bytes(nn.Identity(), run, _CPU) == alone == 2 * _KB * 4
