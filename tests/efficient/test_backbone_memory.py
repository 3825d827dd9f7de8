from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture import backbone_memory
from lightning_speedkit.architecture.backbone_memory import peak_mib
from lightning_speedkit.measure.memory_use import DeviceMemory

MIB = 2**20


def test_peak_of_inference_is_weights_input_and_output() -> None:
    net, x = nn.Linear(64, 4096, bias=False), torch.zeros(256, 64)

    def run() -> None:
        with torch.no_grad():
            net(x)

    run()
    assert peak_mib(net, x, run) == pytest.approx((64 * 4096 + 256 * 64 + 256 * 4096) * 4 / MIB, rel=1e-3)


def test_views_and_what_was_there_count_once_and_what_is_freed_no_more() -> None:
    net, x, other = nn.Identity(), torch.zeros(4), torch.zeros(2**18)

    def run() -> None:
        other.view(2, -1).add_(1)  # was there, in place
        for _ in range(3):
            made = torch.zeros(2**18)
            made.view(4, -1).t().reshape(-1)[:8].add_(made[:8])  # a copy of it besides

    assert peak_mib(net, x, run) == pytest.approx(2, rel=1e-3)


def test_a_profiler_that_runs_already_goes_on() -> None:
    net, x = nn.Linear(4, 4), torch.zeros(1, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as told:
        assert peak_mib(net, x, lambda: net(x)) == pytest.approx((16 + 4 + 4 + 4) * 4 / MIB)
        net(x)
    assert "aten::linear" in {event.key for event in told.key_averages()}


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="a fault"):
        peak_mib(nn.Identity(), torch.zeros(1), Mock(side_effect=RuntimeError("a fault")))


def test_peak_on_a_gpu_is_by_its_allocator() -> None:
    """No GPU: the counters are made up, and the tensors are on the meta device under the name of another."""
    before = DeviceMemory(allocated_bytes=10 * MIB, peak_bytes=10 * MIB, reserved_bytes=0)
    after = DeviceMemory(allocated_bytes=10 * MIB, peak_bytes=17 * MIB, reserved_bytes=0)
    inputs = Mock(nbytes=MIB, device=torch.device("cuda"))
    with (
        patch.object(backbone_memory, "read_device_memory", side_effect=[before, after]),
        patch.object(backbone_memory, "reset_device_peak") as reset,
        patch.object(torch.cuda, "synchronize"),
    ):
        assert peak_mib(nn.Identity(), inputs, Mock()) == 8
    reset.assert_called_once_with(torch.device("cuda"))
    assert peak_mib(nn.Identity(), Mock(nbytes=MIB, device=torch.device("mps")), Mock()) is None
