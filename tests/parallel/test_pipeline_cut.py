"""The cut of a chain of layers, against all cuts that there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.parallel.pipeline_cut import balanced_split, cut_points, find_chain, measure_layers, stages_of


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


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2))})
        self.other = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))


def test_the_chain_is_found_by_its_name() -> None:
    assert find_chain(_Two(), "deep.net") == "deep.net"
    assert find_chain(_Two().deep, None) == "net"
    for name in (None, "deep", "net"):
        with pytest.raises(
            MisconfigurationException, match=r"is no nn\.Sequential of _Two, which has 'deep\.net', 'other'"
        ):
            find_chain(_Two(), name)


def test_layers_without_weights_stay_with_the_one_before() -> None:
    module = _Two()
    assert cut_points(module, "deep.net", 3) == [2, 3]
    assert stages_of(module, "deep.net", 3, [2, 3]) == [["0", "1"], ["2"], ["3"]]
    with pytest.raises(
        MisconfigurationException, match=r"4 stages are more than the 4 layers of 'deep\.net', of which 3"
    ):
        cut_points(module, "deep.net", 4)


@pytest.mark.parametrize("points", [[], [0, 2], [2, 2], [3, 1], [1, 4], [1, 2, 3]])
def test_points_that_do_not_rise_are_refused(points: list[int]) -> None:
    with pytest.raises(MisconfigurationException, match="must be 2 rising layer indices from 1 to 3 for 3 stages"):
        stages_of(_Two(), "deep.net", 3, points)
