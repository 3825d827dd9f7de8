"""A file of torch.export that would run code when it is loaded is refused before torch sees it."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.pt2_check import check_program_file
from lightning_speedkit.errors import QuantizationError


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def program() -> bytes:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    exported = torch.export.export(net, (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    written = io.BytesIO()
    torch.export.save(exported, written)
    return written.getvalue()


def _changed(program: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return written.getvalue()


def test_a_program_of_torch_passes_and_loads(program: bytes) -> None:
    check_program_file(program, "model.pt2")
    same = _changed(program, lambda _, content: content)
    check_program_file(same, "model.pt2")
    assert torch.export.load(io.BytesIO(same)).module()(torch.ones(2, 4)).shape == (2, 3)


def test_a_pickle_with_code_among_the_sample_inputs(program: bytes, tmp_path: Path) -> None:
    written = io.BytesIO()
    torch.save(_Evil(tmp_path / "ran"), written)
    evil = _changed(program, lambda name, old: written.getvalue() if "sample_inputs" in name else old)
    with pytest.raises(QuantizationError, match=r"model.pt2 holds data/sample_inputs/\S+, which asks for code"):
        check_program_file(evil, "model.pt2")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Exception, match=r".*"):  # torch itself runs it, and fails on what it is
        torch.export.load(io.BytesIO(evil))
    assert (tmp_path / "ran").exists()


def test_a_pickled_weight_with_code(program: bytes, tmp_path: Path) -> None:
    pickled: list[str] = []

    def change(name: str, old: bytes) -> bytes:
        if name.endswith("weights_config.json") or ("weights" in name and name.endswith(".json")):
            told = json.loads(old)
            for meta in told["config"].values():
                meta["use_pickle"] = True
                pickled.append(meta["path_name"])
            return json.dumps(told).encode()
        return old

    marked = _changed(program, change)
    assert pickled
    evil = _changed(
        marked, lambda n, old: pickle.dumps(_Evil(tmp_path / "ran")) if n.split("/")[-1] in pickled else old
    )
    with pytest.raises(QuantizationError, match="which asks for code"):
        check_program_file(evil, "model.pt2")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"torch.ops.aten.relu.default", b"torch.os.system", "calls 'torch.os.system', which is no operator"),
        (b"torch.ops.aten.relu.default", b"torch.ops.evil.relu.default", "which is no operator"),
        (b"Symbol('s", b"__import__('os').system('s", "holds the expression"),
    ],
)
def test_an_operator_or_an_expression_that_reaches_code(old: bytes, new: bytes, said: str, program: bytes) -> None:
    seen: list[bool] = []

    def change(name: str, content: bytes) -> bytes:
        if name.split("/", 1)[-1].startswith("models/"):
            seen.append(old in content)
            return content.replace(old, new)
        return content

    evil = _changed(program, change)
    assert any(seen)
    with pytest.raises(QuantizationError, match=said):
        check_program_file(evil, "model.pt2")


def test_an_object_of_code_and_what_is_no_program(program: bytes) -> None:
    written = io.BytesIO(program)
    with zipfile.ZipFile(written, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/data/constants/opaque_obj_0", pickle.dumps(3))
    with pytest.raises(QuantizationError, match="an object with code"):
        check_program_file(written.getvalue(), "model.pt2")
    for content in (b"", b"nothing", program[: len(program) // 2]):
        with pytest.raises(QuantizationError, match=r"model.pt2 is damaged or no file of torch.export"):
            check_program_file(content, "model.pt2")
