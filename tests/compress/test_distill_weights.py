"""Weights of a teacher from a file: found under a prefix, refused by name, and never executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.distill_weights import is_of_trainer, load_weights, read_weights

FILE = Path("teacher.pt")


class _Runs:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a file was executed",)


@pytest.mark.parametrize("prefix", ["", "net.", "model.net."])
@pytest.mark.parametrize("wrapped", [True, False])
def test_weights_are_found_whatever_attribute_held_them(prefix: str, wrapped: bool, tmp_path: Path) -> None:
    saved, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {f"{prefix}{name}": value for name, value in saved.state_dict().items()} | {"other": torch.ones(1)}
    if not prefix:
        del state["other"]
    torch.save({"state_dict": state} if wrapped else state, tmp_path / FILE)
    load_weights(teacher, read_weights(tmp_path / FILE), tmp_path / FILE)
    torch.testing.assert_close(teacher.state_dict(), saved.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            nn.Linear(3, 4).state_dict(),
            r"a Linear: 'weight' has shape \(2, 3\) in the teacher and \(4, 3\) in the file",
        ),
        (nn.Linear(3, 2, bias=False).state_dict(), r"it lacks \['bias'\], and has none beside them"),
        ({"a": torch.ones(1)}, r"it lacks \['bias', 'weight'\], and has \['a'\] beside them"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(state: dict[str, Any], told: str) -> None:
    teacher = nn.Linear(3, 2)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{told}.*Give a teacher of the structure that was saved"):
        load_weights(teacher, state, FILE)
    torch.testing.assert_close(dict(teacher.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([1, 2], "holds no weights by name"),
        ({"state_dict": 3}, "holds no weights by name"),
        ({"state_dict": {}, "hook": _Runs()}, "would execute code when it is loaded"),
        (b"no file of torch", "is no checkpoint, or is damaged"),
    ],
)
def test_what_holds_no_weights_is_refused_and_not_executed(content: Any, told: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / FILE).write_bytes(content)
    else:
        torch.save(content, tmp_path / FILE)
    with pytest.raises(ValueError, match=told):
        read_weights(tmp_path / FILE)


def test_a_file_that_is_not_there_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        read_weights(Path("nowhere") / FILE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, True), ({"state_dict": {}}, False), ({}, False)],
)
def test_a_checkpoint_of_a_trainer_is_known_by_its_version(content: dict[str, Any], expected: bool) -> None:
    assert is_of_trainer(content) is expected
