"""What a budget chooses among: paths written down by hand, and which modules count as equal."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_speedkit.memory import checkpoint_modules
from lightning_speedkit.memory.checkpoint_budget_candidates import candidate_paths, units_of
from lightning_speedkit.memory.checkpoint_budget_model import ModuleProfile
from lightning_speedkit.memory.checkpoint_budget_search import walk_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.norm = nn.LayerNorm(4)
        self.branch = nn.Sequential(nn.Linear(4, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branch(self.norm(x))
        return out


class Model(nn.Module):
    """Repeated blocks, a single layer before them, and composite modules beside, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.trunk = nn.Sequential(Block(), Block())
        self.listed = nn.ModuleList([nn.Sequential(nn.Flatten())])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_blocks_what_holds_them_what_is_inside_and_what_is_beside() -> None:
    assert candidate_paths(Model(), "auto") == (
        *("trunk", "trunk.0", "trunk.0.attention", "trunk.0.branch"),
        *("trunk.1", "trunk.1.attention", "trunk.1.branch", "head"),
    )


def test_where_nothing_repeats_composite_modules_two_levels_deep() -> None:
    deepest = nn.Sequential(nn.Linear(2, 2))
    model = nn.Module()
    model.a = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), deepest))
    model.b = nn.Linear(2, 2)
    assert candidate_paths(model, "auto") == ("a", "a.1")


def test_named_ones_may_lie_inside_each_other() -> None:
    assert candidate_paths(Model(), "Block") == ("trunk.0", "trunk.1")
    assert candidate_paths(Model(), ["trunk", "trunk.*"]) == ("trunk", "trunk.0", "trunk.1")


def test_what_cannot_be_recomputed_is_left_out_and_refused_by_name() -> None:
    model = Model()
    model.trunk[1].norm = nn.SyncBatchNorm(4)
    found = candidate_paths(model, "auto")
    assert {"trunk", "trunk.1"}.isdisjoint(found)
    assert {"trunk.0", "trunk.1.branch"} < set(found)
    with pytest.raises(ValueError, match=r"'trunk\.1' holds a SyncBatchNorm"):
        candidate_paths(model, "trunk.1")


def test_what_is_checkpointed_already_is_refused() -> None:
    model = Model()
    checkpoint_modules(model, "trunk.1")
    with pytest.raises(ValueError, match=r"'trunk\.1' is checkpointed already"):
        candidate_paths(model, "auto")


def test_a_model_of_single_layers_has_no_candidates() -> None:
    with pytest.raises(ValueError, match="no composite modules"):
        candidate_paths(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), "auto")


def test_equal_modules_share_the_middle_of_their_seconds() -> None:
    """The third block saves other bytes, so it is of a kind of its own; so is a block whose inside differs."""
    model = nn.Sequential(*(Block() for _ in range(5)))
    profile = {
        path: ModuleProfile(path, saved, 8, 4, seconds)
        for path, saved, seconds in [
            *(("0", 100, 1.0), ("0.branch", 40, 0.5)),
            *(("1", 100, 3.0), ("1.branch", 40, 0.1)),
            *(("2", 90, 7.0), ("2.branch", 40, 0.3)),
            *(("3", 100, 9.0), ("3.branch", 41, 0.9)),
            *(("4", 100, 1.5), ("4.branch", 40, 0.2)),
        ]
    }
    units = units_of(model, profile)
    assert [unit.path for unit in units] == ["0", "1", "2", "3", "4"]
    assert [unit.seconds for unit in units] == [1.5, 1.5, 7.0, 9.0, 1.5]
    assert {unit.path: unit.seconds for unit in walk_units(units) if "branch" in unit.path} == {
        **dict.fromkeys(["0.branch", "1.branch", "2.branch", "4.branch"], 0.25),  # of 0.1, 0.2, 0.3 and 0.5
        "3.branch": 0.9,
    }
    assert units[0].kind == units[1].kind == units[4].kind
    assert len({unit.kind for unit in units}) == 3
