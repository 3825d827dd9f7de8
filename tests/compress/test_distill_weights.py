"""The weights of a file: what is taken, and what is refused without executing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.distill_weights import is_of_trainer, load_weights, read_weights


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))


def _state(value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in _net().state_dict().items()}


def test_a_state_dict_and_a_checkpoint_of_a_trainer_are_read_and_told_apart(tmp_path: Path) -> None:
    path, state = tmp_path / "weights.pt", _state(0.5)
    for content, of_trainer in (
        (state, False),
        ({"state_dict": state}, False),
        ({"state_dict": state, "pytorch-lightning_version": "2.6.6"}, True),
    ):
        torch.save(content, path)
        read = read_weights(path)
        assert is_of_trainer(read) is of_trainer
        net = _net()
        load_weights(net, read, path)
        torch.testing.assert_close(dict(net.state_dict()), state, rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["net.", "model.encoder."])
def test_weights_of_an_attribute_are_found_beside_others(prefix: str) -> None:
    net = _net()
    content = {f"{prefix}{name}": tensor for name, tensor in _state(0.25).items()}
    load_weights(net, {**content, "loss.weight": torch.ones(1)}, Path("w.pt"))
    torch.testing.assert_close(dict(net.state_dict()), _state(0.25), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("0.bias"), r"it lacks \['0.bias'\], and has none beside them"),
        (lambda state: state.update({"9.bias": torch.ones(1)}), r"it lacks none, and has \['9.bias'\] beside them"),
        (
            lambda state: state.update({"0.weight": torch.ones(2, 4)}),
            r"'0.weight' has shape \(2, 3\) in the teacher and \(2, 4\) in the file",
        ),
        (lambda state: state.update({"0.bias": 1.0}), r"'0.bias' has shape \(2,\) in the teacher and \(\) in the file"),
    ],
    ids=["lacks", "more", "shape", "no tensor"],
)
def test_other_weights_are_refused_and_the_teacher_stays(change: Any, told: str) -> None:
    net, state = _net(), _state(0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    change(state)
    with pytest.raises(ValueError, match=told):
        load_weights(net, state, Path("w.pt"))
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)


def test_no_file_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path / "none.pt")
