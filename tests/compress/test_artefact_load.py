"""A network made again from its graphs: answers known by hand, and damaged or hostile folders refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import lightning_speedkit.compress.artefact_load as artefact_load
from lightning_speedkit.compress.artefact import load_quantized
from lightning_speedkit.compress.artefact_load import load_from_folder
from lightning_speedkit.compress.call_form import CallForm, form_of
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.errors import MissingExtraError, QuantizationError

X = torch.tensor([[1.0, -2.0]])


class _Half(nn.Module):
    """The float network, which the graphs below are not made from: what they answer is another number."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 2)
        self.bias = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(x)) + self.bias
        return result


FORM = form_of(nn.Linear(2, 2), (X,), {}, X)


def _times(factor: float) -> bytes:
    """A graph that multiplies, written by hand."""
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("input_0", "out")}
    graph = helper.make_graph(
        [helper.make_node("Mul", ["input_0", "by"], ["out"])],
        "times",
        [value["input_0"]],
        [value["out"]],
        [numpy_helper.from_array(torch.tensor(factor).numpy(), "by")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _write(
    folder: Path, parts: Mapping[str, bytes], *, form: str = "onnx", rest: bytes | None = None, **told: Any
) -> dict[str, Any]:
    """A folder with one file for each part, and its manifest, which is returned."""
    files = {f"model-{index}.{form}": content for index, content in enumerate(parts.values())}
    named = [{"name": name, "file": file, "form": FORM.to_plain()} for name, file in zip(parts, files, strict=True)]
    if rest is not None:
        files["rest.pt"] = rest
        told["rest"] = "rest.pt"
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest = {
        "kind": "quantized network",
        "schema": 1,
        "formats": {form: {"files": list(files), "parts": named, **told}},
        "files": {n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in files.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def _saved(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def program() -> bytes:
    class Triple(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * 3,)

    written = io.BytesIO()
    torch.export.save(torch.export.export(Triple(), (torch.ones(3, 2),)), written)
    return written.getvalue()


def test_the_root_alone_answers_as_its_graph(tmp_path: Path) -> None:
    net = load_from_folder(tmp_path, _write(tmp_path, {"": _times(3.0)}), None, None)
    assert net(X).tolist() == [[3.0, -6.0]]
    assert net(input=X).tolist() == [[3.0, -6.0]]  # by the name of the float forward
    assert not net.training
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        net()


def test_a_program_answers_as_it_was_exported(program: bytes, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": program}, form="pt2")
    x = torch.ones(3, 2)
    assert torch.equal(load_from_folder(tmp_path, manifest, None, "pt2")(x), torch.full((3, 2), 3.0))


def test_several_parts_are_attributes_also_nested_ones(tmp_path: Path) -> None:
    parts = {"net.encoder": _times(2.0), "net.deep.decoder": _times(5.0), "head": _times(-1.0)}
    net = load_from_folder(tmp_path, _write(tmp_path, parts), None, None)
    answers = {name: net.get_submodule(name)(X).tolist() for name in parts}
    assert answers == {"net.encoder": [[2.0, -4.0]], "net.deep.decoder": [[5.0, -10.0]], "head": [[-1.0, 2.0]]}
    assert not net.training


def test_parts_are_installed_into_a_copy_and_the_rest_is_read(tmp_path: Path) -> None:
    rest = _saved({"bias": torch.tensor([100.0])})
    manifest = _write(tmp_path, {"encoder": _times(2.0), "decoder": _times(5.0)}, rest=rest, is_partial=True)
    given = _Half().train()
    before = fingerprint(given)
    net = load_from_folder(tmp_path, manifest, given, None)
    assert isinstance(net, _Half)
    assert net(X).tolist() == [[110.0, 80.0]]
    assert not net.training
    assert fingerprint(given) == before
    assert given.training
    assert type(given.encoder) is nn.Linear


def test_the_root_is_installed_with_its_class_kept(tmp_path: Path) -> None:
    given = _Half()
    net = load_from_folder(tmp_path, _write(tmp_path, {"": _times(4.0)}), given, None)
    assert isinstance(net, _Half)
    assert net(X).tolist() == [[4.0, -8.0]]
    assert type(given) is _Half


def test_parts_alone_and_parts_of_another_network(tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"encoder": _times(2.0), "tail": _times(5.0)}, is_partial=True)
    with pytest.raises(QuantizationError, match=r"Only parts of the network in .* are graphs \(encoder, tail\)"):
        load_from_folder(tmp_path, manifest, None, None)
    given = _Half()
    with pytest.raises(QuantizationError, match="has a part 'tail', and a _Half like this one has not"):
        load_from_folder(tmp_path, manifest, given, None)
    assert type(given.encoder) is nn.Linear


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"no state",
        _saved({"bias": torch.ones(1)})[:-40],
        _saved({"bias": torch.ones(7)}),
        _saved({"other": torch.ones(1)}),
        _saved({}),
        _saved([1, 2]),
    ],
    ids=["empty", "text", "cut", "shape", "name", "nothing", "list"],
)
def test_a_rest_that_does_not_fit_is_refused(rest: bytes, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"encoder": _times(2.0), "decoder": _times(5.0)}, rest=rest)
    with pytest.raises(QuantizationError, match=r"rest\.pt does not fit a _Half like this one"):
        load_from_folder(tmp_path, manifest, _Half(), None)


def test_code_in_the_rest_is_not_run(tmp_path: Path) -> None:
    rest = _saved(_Evil(tmp_path / "ran"))
    manifest = _write(tmp_path, {"encoder": _times(2.0), "decoder": _times(5.0)}, rest=rest)
    with pytest.raises(QuantizationError, match=r"rest\.pt does not fit"):
        load_from_folder(tmp_path, manifest, _Half(), None)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TypeError):  # as torch itself would: os.mkdir answers None, which is no state
        _Half().load_state_dict(torch.load(io.BytesIO(rest), weights_only=False))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("content", [b"", b"no graph", b"PK\x03\x04 cut off"], ids=["empty", "text", "cut"])
def test_what_is_no_graph_is_refused_by_its_path(form: str, content: bytes, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": content}, form=form)  # with the right hash
    with pytest.raises(QuantizationError, match=rf"model-0\.{form}"):
        load_from_folder(tmp_path, manifest, None, None)


def test_code_in_a_program_is_not_run(program: bytes, tmp_path: Path) -> None:
    written, evil = io.BytesIO(), _saved(_Evil(tmp_path / "ran"))
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(written, "w") as new:
        assert any("sample_inputs" in name for name in old.namelist())
        for name in old.namelist():
            new.writestr(name, evil if "sample_inputs" in name else old.read(name))
    manifest = _write(tmp_path, {"": written.getvalue()}, form="pt2")
    with pytest.raises(QuantizationError, match=r"model-0\.pt2 holds data/sample_inputs/.*, which asks for code"):
        load_from_folder(tmp_path, manifest, None, None)
    assert not (tmp_path / "ran").exists()


def test_a_program_that_torch_does_not_read_is_told_with_its_version(
    program: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("schema 99")

    monkeypatch.setattr(torch.export, "load", fails)
    with pytest.raises(
        QuantizationError, match=rf"model-0\.pt2 cannot be read by torch {torch.__version__}".replace("+", r"\+")
    ):
        load_from_folder(tmp_path, _write(tmp_path, {"": program}, form="pt2"), None, None)


def test_a_program_of_torchao_without_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    manifest = _write(tmp_path, {"": b"torch.ops.torchao.x"}, form="pt2")
    with pytest.raises(MissingExtraError, match=r"needs torchao, .*pip install 'lightning-speedkit\[quant\]'"):
        load_from_folder(tmp_path, manifest, None, None)


@pytest.mark.parametrize("damaged", ["model-0.onnx", "model-1.onnx", "rest.pt"])
def test_every_file_is_checked_before_one_is_opened(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(artefact_load, "OnnxModule", lambda *_: opened.append("graph"))
    manifest = _write(tmp_path, {"encoder": _times(2.0), "decoder": _times(5.0)}, rest=_saved({}))
    content = bytearray((tmp_path / damaged).read_bytes())
    content[-1] ^= 1
    (tmp_path / damaged).write_bytes(content)
    with pytest.raises(QuantizationError, match=rf"{damaged} is not the file that was written".replace(".", r"\.")):
        load_from_folder(tmp_path, manifest, _Half(), None)
    assert opened == []


def test_a_format_that_is_not_there_and_a_state_without_a_model(tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": _times(2.0)})
    content = _saved({"format": 1})
    (tmp_path / "model.pt").write_bytes(content)
    manifest["files"]["model.pt"] = {"sha256": hashlib.sha256(content).hexdigest()}
    manifest["formats"]["state_dict"] = {"files": ["model.pt"]}
    with pytest.raises(QuantizationError, match="has the formats onnx, state_dict, and not 'pt2'"):
        load_from_folder(tmp_path, manifest, None, "pt2")
    with pytest.raises(QuantizationError, match=r"model\.pt holds the state alone"):
        load_from_folder(tmp_path, manifest, None, "state_dict")


@pytest.mark.parametrize(
    "parts",
    [
        None,
        7,
        [{"file": "model-0.onnx", "form": FORM.to_plain()}],
        [{"name": "", "form": FORM.to_plain()}],
        [{"name": "", "file": "model-0.onnx"}],
        [{"name": "", "file": "model-0.onnx", "form": {**FORM.to_plain(), "parameters": [["x"]]}}],
        [{"name": "", "file": "model-0.onnx", "form": {**FORM.to_plain(), "arguments": {"dict": 1}}}],
        [{"name": "", "file": "model-0.onnx", "form": {**FORM.to_plain(), "answer": {}}}],
    ],
    ids=["none", "number", "no name", "no file", "no form", "parameters", "arguments", "answer"],
)
def test_damaged_parts_of_a_manifest_are_told(parts: Any, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": _times(2.0)})
    manifest["formats"]["onnx"]["parts"] = parts
    with pytest.raises(QuantizationError, match=r"manifest\.json is damaged"):
        load_from_folder(tmp_path, manifest, None, None)


@pytest.mark.parametrize(("full_range", "exact", "warned"), [(1, False, True), (1, True, False), (0, False, False)])
def test_weights_of_8_bits_warn_once_where_they_overflow(
    full_range: int, exact: bool, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artefact_load, "has_exact_int8", lambda: exact)
    _write(tmp_path, {"encoder": _times(2.0), "decoder": _times(5.0)}, full_range=bool(full_range))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load_quantized(tmp_path)
    told = [(Path(w.filename).name, "may overflow" in str(w.message)) for w in seen]
    assert told == ([(Path(__file__).name, True)] if warned else [])


def test_a_form_is_read_as_it_was_written() -> None:
    assert CallForm.from_plain(json.loads(json.dumps(FORM.to_plain()))) == FORM


class _Wider(nn.Module):
    """Has the parts of ``_Half``, and one that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 5), nn.Linear(5, 2)
        self.bias = nn.Parameter(torch.tensor([0.5]))


class _More(_Half):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


class _Less(_Half):
    def __init__(self) -> None:
        super().__init__()
        del self.bias


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("part", ["", "encoder"])
@pytest.mark.parametrize(
    ("foreign", "told"),
    [
        (_Wider, r"_Wider like this: its parameter 'encoder\.weight' has shape \(5, 2\), in the file \(2, 2\)"),
        (_More, r"_More like this: its parameter 'head\.weight' is not in the file"),
        (_Less, r"_Less like this: it has no parameter 'bias', which is in the file"),
        (nn.Identity, r"Identity like this: it has no parameter "),
    ],
)
def test_a_foreign_model_is_refused_by_the_name_of_a_weight(
    form: str, part: str, foreign: Any, told: str, program: bytes, tmp_path: Path
) -> None:
    weights = {name: list(weight.shape) for name, weight in _Half().named_parameters()}
    graph = _times(2.0) if form == "onnx" else program
    manifest = _write(tmp_path, {part: graph}, form=form, weights=weights)
    with pytest.raises(QuantizationError, match=told) as refusal:
        load_from_folder(tmp_path, manifest, foreign(), None)
    assert str(refusal.value).endswith(f"with any weights, or no model: load_quantized({str(tmp_path)!r}).")
    assert isinstance(load_from_folder(tmp_path, manifest, _Half().double(), None), _Half)


def test_a_folder_of_an_older_version_names_no_weights_and_takes_the_model_as_it_is(tmp_path: Path) -> None:
    net = load_from_folder(tmp_path, _write(tmp_path, {"": _times(3.0)}), _More(), None)
    assert net(X).tolist() == [[3.0, -6.0]]


@pytest.mark.parametrize("weights", [3, {"encoder.weight": 3}, [1]])
def test_weights_that_are_none_are_damage(weights: Any, tmp_path: Path) -> None:
    manifest = _write(tmp_path, {"": _times(3.0)}, weights=weights)
    with pytest.raises(QuantizationError, match=r"manifest\.json is damaged"):
        load_from_folder(tmp_path, manifest, _Half(), None)


def test_state_dict_of_what_was_loaded_has_the_weights_of_the_given_model(tmp_path: Path) -> None:
    given = _Half()
    net = load_from_folder(tmp_path, _write(tmp_path, {"": _times(3.0)}), given, None)
    torch.testing.assert_close(dict(net.state_dict()), dict(given.state_dict()), rtol=0, atol=0)
