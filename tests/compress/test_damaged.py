"""Damaged manifests and recipes, and conversions that leave nothing quantized, are errors that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.artefact_load import load_from_folder
from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.convert import convert_model
from lightning_speedkit.compress.engine import engine_named
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.torchao_state import load_torchao
from lightning_speedkit.compress.torchao_weights import quantize_layers
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import RowReader
from tests.compress.test_artefact_load import _Half, _times, _write
from tests.compress.test_torchao_state import _net, _written


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("change", [{"parts": []}, {"parts": "file"}, {"rest": "gone.pt"}])
def test_parts_that_the_manifest_does_not_name(change: dict[str, Any], given: bool, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": _times(2.0)})
    told = manifest["formats"]["onnx"]
    if change.get("parts") == "file":
        told["parts"][0]["file"] = "other.onnx"
    else:
        told.update(change)
    with pytest.raises(QuantizationError, match=r"manifest\.json is damaged"):
        load_from_folder(tmp_path, manifest, _Half() if given else None, None)


def test_a_network_called_as_a_whole_and_in_parts_needs_its_module(tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": _times(2.0), "encoder": _times(3.0)})
    with pytest.raises(QuantizationError, match=r"called as a whole and in parts \(encoder\)"):
        load_from_folder(tmp_path, manifest, None, None)
    net = load_from_folder(tmp_path, manifest, _Half(), None)
    x = torch.ones(1, 2)
    assert (net(x).tolist(), net.encoder(x).tolist()) == ([[2.0, 2.0]], [[3.0, 3.0]])


def test_nothing_that_can_be_quantized_is_an_error() -> None:
    p = engine_named("torch-ao-dynamic").prepare(
        float_copy(nn.Sequential(nn.Linear(4, 2))), [Call("", (torch.ones(2, 4),), {})]
    )
    with pytest.raises(QuantizationError, match=r"No layer can be quantized by torch.ao \(0: named in skip\)"):
        p.convert(["*"])
    with pytest.raises(QuantizationError, match="No layer"):
        convert_model(nn.Sequential(nn.ReLU()), [torch.ones(2, 4)])


def test_recurrent_layers_are_quantized_beside_static_ones() -> None:
    p = engine_named("torch-ao-static").prepare(float_copy(RowReader()), [Call("", (torch.randn(4, 1, 8, 8),), {})])
    assert p.layers == p.convert().quantized == ("rnn", "head")


def test_a_recipe_that_leaves_out_a_layer_is_refused(tmp_path: Path) -> None:
    _, content = _written(tmp_path)
    content["recipe"]["layers"] = []
    with pytest.raises(QuantizationError, match=r"0.weight has the tensors \[\], in the file"):
        load_torchao(_net(), content)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(QuantizationError, match="song"):
        quantize_layers(nn.Sequential(nn.Linear(32, 2)), ["0"], "song", "cpu")
