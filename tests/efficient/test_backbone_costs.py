from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture import backbone_costs
from lightning_speedkit.architecture.backbone_costs import Measured, count_parameters
from tests.efficient.tiny_backbones import Clock, Tiny

MIB = 2**20


def test_flops_are_those_of_one_image() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    one = Measured(net, (4, 8, 8), 10, 5, torch.device("cpu"))
    assert one.flops() == 2 * (8 * 4 * 4) * (2 * 9) + 2 * 128 * 10


def test_shared_parameters_count_once() -> None:
    layer = nn.Linear(3, 3)
    assert count_parameters(nn.Sequential(layer, layer)) == 12


def test_peak_of_training_is_four_times_the_weights_of_a_large_layer() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    one = Measured(net, (1, 32, 32), 10, 2, torch.device("cpu"))
    before = [p.clone() for p in net.parameters()]
    inference, training = one.memory()
    weights = count_parameters(net) * 4 / MIB
    assert inference == pytest.approx(weights, rel=0.02)
    assert training == pytest.approx(4 * weights, rel=0.02)  # weights, gradients, two moments of AdamW
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_a_round_times_each_kind_after_one_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(backbone_costs.time, "perf_counter", clock)
    net = Tiny("a", clock, 0.5, 10)
    one = Measured(net, (3, 4, 4), 10, 4, torch.device("cpu"))
    one.round()
    one.round()
    assert clock.calls == 2 * ([("a", 1, False)] * 4 + [("a", 4, False)] * 2 + [("a", 4, True)] * 2)
    assert one.seconds == {"one": [0.5] * 6, "batch": [2.0] * 2, "training": [6.0] * 2}
    assert one.median("training") == 6.0


@pytest.mark.parametrize(("output", "got"), [(torch.zeros(1, 9), r"\(1, 9\)"), ((torch.zeros(1, 10),), "tuple")])
def test_what_is_not_logits_is_told(output: object, got: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return output

    with pytest.raises(ValueError, match=f"output for one image is {got}, not logits of shape"):
        Measured(Odd(), (3, 4, 4), 10, 4, torch.device("cpu")).check()
