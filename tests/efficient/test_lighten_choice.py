"""The choices against costs worked out by hand, and their errors against what is really built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture.lighten_choice import KINDS, choices_for, largest_rank, share_of
from lightning_speedkit.architecture.lighten_layers import lighter_layer


def test_the_shares_are_those_worked_out_by_hand() -> None:
    # Linear(100, 50) at rank 10: 10 * 150 of 5000. Depthwise 3 x 3 from 32 to 64: 32 * 9 + 32 * 64 of 32 * 64 * 9.
    assert share_of((50, 100), 1, 10) == pytest.approx(1500 / 5000)
    assert share_of((64, 32, 3, 3), 32, 1) == pytest.approx((288 + 2048) / 18432)
    # four groups of 8 channels, 5 kernels in each: 20 * 8 * 9 + 20 * 64
    assert share_of((64, 32, 3, 3), 4, 5) == pytest.approx((20 * 72 + 20 * 64) / 18432)
    assert [largest_rank((64, 32, 3, 3), groups) for groups in (1, 4, 32)] == [64, 64, 9]


@pytest.mark.parametrize("layer", [nn.Linear(48, 40), nn.Conv2d(16, 48, 3), nn.Conv1d(16, 24, 5), nn.Conv2d(32, 32, 1)])
def test_every_choice_costs_no_more_than_asked_and_errs_as_told(layer: nn.Module) -> None:
    told = choices_for(layer, KINDS, ratio=0.4)
    assert told
    weight = layer.get_parameter("weight").detach()
    for choice in told:
        assert choice.share <= 0.4
        made = lighter_layer(layer, choice.groups, choice.rank, warm_start=True)
        factors = sum(p.numel() for name, p in made.named_parameters() if "bias" not in name)
        assert choice.share == pytest.approx(factors / weight.numel())
        read = made.weight.detach()
        assert choice.error == pytest.approx(float((read - weight).norm() / weight.norm()), abs=1e-4)
    assert [c.error for c in told] == sorted(c.error for c in told)


def test_kinds_fit_some_layers_only() -> None:
    assert {c.kind for c in choices_for(nn.Linear(32, 32), KINDS, 0.5)} == {"low-rank"}
    assert {c.kind for c in choices_for(nn.Conv2d(32, 32, 1), KINDS, 0.5)} == {"low-rank"}
    assert {c.kind for c in choices_for(nn.Conv2d(32, 32, 3), KINDS, 0.5)} == set(KINDS)
    assert choices_for(nn.Linear(32, 32), ["depthwise", "grouped"], 0.5) == []


def test_rank_and_energy() -> None:
    linear = nn.Linear(40, 30, bias=False)
    left, _, right = torch.linalg.svd(torch.randn(30, 40), full_matrices=False)
    linear.weight = nn.Parameter(left @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0] + [0.0] * 26)) @ right)
    # squares 64, 16, 4, 1 of 85: two keep 94 %, three 98.8 %
    assert [choices_for(linear, ["low-rank"], 0.5, energy=e)[0].rank for e in (0.7, 0.9, 0.98, 0.999)] == [1, 2, 3, 4]
    assert choices_for(linear, ["low-rank"], 0.1, energy=0.9) == []  # rank 2 takes 140 of 1200
    assert choices_for(linear, ["low-rank"], 0.5, rank=2)[0].error == pytest.approx((5 / 85) ** 0.5, rel=1e-4)
    assert choices_for(linear, ["low-rank"], 0.5, rank=9) == []
    assert choices_for(nn.Linear(512, 512), ["low-rank"], 0.46)[0].rank == 112  # 117 would fit
