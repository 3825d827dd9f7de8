"""A folder of artefacts: read again in a fresh process, and refused by the name of the file that is not what it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.artefact import load_quantized
from lightning_speedkit.compress.artefact_folder import artefact_bytes
from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.engine import Converted, engine_named
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Branching, digit_batches

ENGINES = {"onnx": "onnxruntime-static", "pt2": "torchao-weight-int8", "state_dict": "torch-ao-dynamic"}


def _net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def made() -> dict[str, Converted]:
    torch.manual_seed(0)
    floating, calls = float_copy(_net()), [Call("", (batch,), {}) for batch in digit_batches(2)]
    return {form: engine_named(name).convert(floating, calls) for form, name in ENGINES.items()}


@pytest.fixture
def folder(made: dict[str, Converted], tmp_path: Path) -> Path:
    made["onnx"].save(tmp_path)
    return tmp_path


FRESH = """
import sys, torch
from torch import nn
from lightning_speedkit.compress import load_quantized
root = sys.argv[1]
x = torch.load(f"{root}/x.pt", weights_only=True)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
answers = {name: load_quantized(f"{root}/{name}", net if name == "state_dict" else None)(x).detach()
           for name in ("onnx", "pt2", "state_dict")}
torch.save(answers, f"{root}/answers.pt")
"""


def test_a_fresh_process_answers_the_same(made: dict[str, Converted], tmp_path: Path) -> None:
    x = digit_batches(1)[0]
    torch.save(x, tmp_path / "x.pt")
    for form, converted in made.items():
        told = converted.save(tmp_path / form, [form])
        assert json.loads((tmp_path / form / "manifest.json").read_text()) == told
        assert told["engine"] == ENGINES[form]
        assert set(told["files"]) | {"manifest.json"} == {p.name for p in (tmp_path / form).iterdir()}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lightning_speedkit", "-c", FRESH, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    answers = torch.load(tmp_path / "answers.pt", weights_only=True)
    for form, converted in made.items():
        torch.testing.assert_close(answers[form], replay(converted.module, [Call("", (x,), {})])[0], rtol=0, atol=1e-5)


def test_bytes_are_those_of_the_files(made: dict[str, Converted], folder: Path) -> None:
    assert made["onnx"].bytes == (folder / "model.onnx").stat().st_size == artefact_bytes(made["onnx"])


def test_a_format_that_the_engine_cannot_write_is_named(made: dict[str, Converted], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"onnxruntime-static cannot be kept as 'pt2'; it can as 'onnx'"):
        made["onnx"].save(tmp_path, ["pt2"])
    assert list(tmp_path.iterdir()) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(_cut, "SHA-256 differs"), (_flip, "SHA-256 differs"), (Path.unlink, "is missing, though manifest.json names it")],
)
def test_a_damaged_file_is_refused_by_name(damage: Callable[[Path], None], said: str, folder: Path) -> None:
    damage(folder / "model.onnx")
    with pytest.raises(QuantizationError, match=rf"model\.onnx .*{said}"):
        load_quantized(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 99}, "schema 99; this version reads"),
        ({"kind": "song"}, "describes a 'song'"),
        ({"files": {"../x": {"sha256": ""}}}, "not plain names"),
        ({"formats": {"onnx": {"files": ["model.onnx"]}}}, "manifest.json is damaged"),
    ],
)
def test_a_foreign_manifest_is_refused_by_name(change: dict[str, object], said: str, folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(QuantizationError, match=rf"manifest\.json.*{said}|{said}"):
        load_quantized(folder)
    path.write_text("{")
    with pytest.raises(QuantizationError, match=r"manifest\.json is damaged"):
        load_quantized(folder)


def test_a_graph_alone_and_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(QuantizationError, match=r"model\.onnx has no manifest\.json beside it"):
        load_quantized(folder / "model.onnx")
    with pytest.raises(FileNotFoundError, match=r"There is no quantized model at .*model\.pt"):
        load_quantized(tmp_path)


def test_the_file_or_the_format_can_be_named(folder: Path) -> None:
    x = digit_batches(1)[0]
    assert torch.equal(load_quantized(folder / "model.onnx")(x), load_quantized(folder, format="onnx")(x))
    with pytest.raises(QuantizationError, match="has the formats onnx, and not 'pt2'"):
        load_quantized(folder, format="pt2")


def test_the_state_alone_needs_a_module(made: dict[str, Converted], tmp_path: Path) -> None:
    made["state_dict"].save(tmp_path)
    with pytest.raises(QuantizationError, match=r"Pass a float model of the same structure: load_quantized\(path, M"):
        load_quantized(tmp_path)


def test_parts_and_what_is_outside_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, calls = Branching(), [Call("", (batch,), {}) for batch in digit_batches(2)]
    net.scale = nn.Parameter(torch.tensor([2.0]))
    made = engine_named("onnxruntime-static").convert(float_copy(net), calls)
    made.save(tmp_path)
    with pytest.raises(QuantizationError, match=r"Only parts of the network .* are graphs \(block, head\)"):
        load_quantized(tmp_path)
    fresh = Branching()
    fresh.scale = nn.Parameter(torch.tensor([0.0]))
    again = load_quantized(tmp_path, fresh)
    assert torch.equal(replay(again, calls)[0], replay(made.module, calls)[0])
    assert float(again.scale) == 2.0
    assert float(fresh.scale.detach()) == 0.0
    with pytest.raises(
        QuantizationError, match=r"Sequential like this: it has no parameter 'scale', .* any weights\.$"
    ):
        load_quantized(tmp_path, _net())


def test_two_parts_that_are_called_from_outside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"encoder": nn.Linear(64, 8), "decoder": nn.Linear(8, 64)})
    x, z = torch.randn(4, 64), torch.randn(4, 8)
    calls = [Call("encoder", (x,), {}), Call("decoder", (z,), {})]
    made = engine_named("onnxruntime-static").convert(float_copy(net), calls)
    made.save(tmp_path)
    again = load_quantized(tmp_path)
    assert torch.equal(again.encoder(x), made.module.get_submodule("encoder")(x))
    assert torch.equal(again.decoder(z), made.module.get_submodule("decoder")(z))


def test_full_range_weights_warn_where_products_overflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_speedkit.compress import artefact_load

    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    told["formats"]["onnx"]["full_range"] = True
    path.write_text(json.dumps(told))
    monkeypatch.setattr(artefact_load, "has_exact_int8", lambda: False)
    with pytest.warns(UserWarning, match="made on a CPU with VNNI"):
        load_quantized(folder)


def test_formats_are_a_list(made: dict[str, Converted], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"formats must be a list of names, got the string 'onnx'; write \['onnx'\]"):
        made["onnx"].save(tmp_path, "onnx")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"formats": {}}, "manifest.json is damaged: it names no format"),
        ({"formats": {"tflite": {"files": []}}}, "is in the format 'tflite'; this version reads state_dict, pt2, onnx"),
    ],
)
def test_a_manifest_without_a_format_that_is_known(change: dict[str, object], said: str, folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(QuantizationError, match=said):
        load_quantized(folder)


@pytest.mark.parametrize("change", [{"parts": []}, {"rest": "other.pt"}])
def test_a_manifest_that_does_not_vouch_for_a_file_or_names_no_part(change: dict[str, object], folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["formats"]["onnx"].update(change)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(QuantizationError, match=r"manifest\.json is damaged: .*(it names no part|does not vouch for)"):
        load_quantized(folder)


def test_a_class_is_no_float_model(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"takes a float model, such as MyModel\(\), got <class"):
        load_quantized(folder, nn.Linear)  # type: ignore[arg-type]
