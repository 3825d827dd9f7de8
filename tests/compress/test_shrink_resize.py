from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_speedkit.compress.shrink_cut import apply_plan
from lightning_speedkit.compress.shrink_resize import SHRUNK_KEY, follow_checkpoints, mark, original_sizes, resize_to
from tests.compress.shrink_models import images, plan_of


class Net(LightningModule):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2))
        self.told: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told.append("save")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told.append(f"load {self.net[1].out_features}")


def _shrunk() -> Net:
    module = Net()
    apply_plan(module, plan_of(module))
    return module


def test_a_shrunk_module_marks_its_checkpoints_and_calls_its_own_hook() -> None:
    module = _shrunk()
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint[SHRUNK_KEY] == {"net.1.weight": [6, 64], "net.1.bias": [6], "net.3.weight": [2, 6]}
    assert module.told == ["save"]


def test_a_fresh_module_takes_the_sizes_and_marks_again() -> None:
    checkpoint: dict[str, Any] = {"state_dict": _shrunk().state_dict()}
    mark(_shrunk(), checkpoint)
    fresh = Net()
    follow_checkpoints(fresh)
    fresh.on_load_checkpoint(checkpoint)
    assert fresh.told == ["load 3"]  # resized before the hook of the class
    fresh.load_state_dict(checkpoint["state_dict"])
    again: dict[str, Any] = {"state_dict": fresh.state_dict()}
    fresh.on_save_checkpoint(again)
    assert again[SHRUNK_KEY] == checkpoint[SHRUNK_KEY]


def test_a_shrunk_module_grows_to_an_early_checkpoint() -> None:
    module, early = _shrunk(), Net()
    assert resize_to(module, {"state_dict": early.state_dict()}) == ["net.1.weight", "net.1.bias", "net.3.weight"]
    module.load_state_dict(early.state_dict())
    assert original_sizes(module) == {}


def test_a_checkpoint_without_a_mark_resizes_nothing() -> None:
    fresh = Net()
    assert resize_to(fresh, {"state_dict": Net(4).state_dict()}) == []
    with pytest.raises(RuntimeError, match="size mismatch"):
        fresh.load_state_dict(Net(4).state_dict())


def test_hooks_are_of_one_module_survive_a_copy_and_go_away() -> None:
    module = _shrunk()
    twin = copy.deepcopy(module)
    twin.on_save_checkpoint({"state_dict": twin.state_dict()})
    assert (module.told, twin.told) == ([], ["save"])
    torch.testing.assert_close(twin(images()), module(images()))
    follow_checkpoints(module, on=False)
    assert not set(vars(module)) & {"on_save_checkpoint", "on_load_checkpoint"}
    own = Net()
    own.on_save_checkpoint = print  # type: ignore[assignment]
    follow_checkpoints(own)
    assert own.on_save_checkpoint is print  # of the user, and stays


def test_other_things_in_the_state_dict_are_no_hindrance() -> None:
    layer = nn.Linear(4, 8)
    state = {"weight": torch.zeros(2, 4), "bias": torch.zeros(1, 2), "other": torch.zeros(3), "_extra_state": {"a": 1}}
    assert resize_to(layer, state) == ["weight"]  # a bias of two dimensions is not one of another size
