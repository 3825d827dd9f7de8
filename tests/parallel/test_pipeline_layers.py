"""The cut of a chain of layers, against all cuts that there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_speedkit.parallel.pipeline_layers import balanced_split, measure_layers


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
def test_no_other_cut_has_a_cheaper_dearest_stage(stages: int) -> None:
    for seed in range(20):
        costs = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()

        def dearest(cut: tuple[int, ...], costs: list[float] = costs) -> float:
            return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)]))

        best = min(dearest(cut) for cut in itertools.combinations(range(1, 7), stages - 1))
        assert dearest(tuple(balanced_split(costs, stages))) == pytest.approx(best)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="3 stages of 2 layers"):
        balanced_split([1.0, 1.0], 3)


def test_measuring_changes_nothing() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1))
    before, state = [p.clone() for p in layers.parameters()], torch.get_rng_state()
    costs = measure_layers(list(layers), torch.ones(4, 2))
    assert len(costs) == 3
    assert all(cost > 0 for cost in costs)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, layers.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
