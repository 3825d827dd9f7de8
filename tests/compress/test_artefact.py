"""An int8 model as a file: it answers the same when it is read again, and nothing else is taken for one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress import load_quantized, quantize_model, save_quantized
from lightning_speedkit.compress.artefact import int8_state, publish
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import (
    Branching,
    ConvNet,
    Digits,
    DirectDigits,
    RowReader,
    digit_batches,
    digits,
    mlp,
)


class TestArtefact:
    def test_another_structure_is_a_clear_error_and_the_module_untouched(self, tmp_path: Path) -> None:
        int8, details = quantize_model(mlp(), [torch.rand(4, 1, 8, 8)])
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        for other in (nn.Linear(2, 2), nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))):
            before = fingerprint(other)
            with pytest.raises(QuantizationError, match=r"does not fit a \w+ like this one .* Pass a float model with"):
                load_quantized(tmp_path, other)
            assert fingerprint(other) == before

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        torch.save({"format": 99}, tmp_path / "model.pt")
        with pytest.raises(QuantizationError, match="has format 99; this version reads the formats 1 and 2"):
            load_quantized(tmp_path / "model.pt", mlp())

    def test_a_failed_write_leaves_the_old_file_and_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        publish(path, lambda temporary: temporary.write_text("old"))

        def fail(temporary: Path) -> None:
            temporary.write_text("half")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            publish(path, fail)
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert path.read_text() == "old"

    def test_layers_left_in_float_are_left_in_float_again(self, tmp_path: Path) -> None:
        def net() -> nn.Module:
            circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
            return nn.Sequential(
                nn.Conv2d(1, 4, 3), circular, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)
            )

        x = torch.rand(4, 1, 8, 8)
        int8, details = quantize_model(net(), [x], skip=["4"])
        assert (details.backend, details.layers_quantized) == ("torch-ao-static", ("0", "3"))
        assert details.skipped == {"1": "padding_mode='circular' has no int8 version", "4": "named in skip"}
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        torch.testing.assert_close(load_quantized(tmp_path, net())(x), int8(x), rtol=0, atol=0)

    def test_weights_of_another_training_are_replaced(self, tmp_path: Path) -> None:
        int8, details = quantize_model(mlp(), [torch.rand(4, 1, 8, 8)])
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        torch.manual_seed(99)
        x = torch.rand(7, 1, 8, 8)
        torch.testing.assert_close(load_quantized(tmp_path, mlp())(x), int8(x), rtol=0, atol=0)


class _Activations(nn.Module):
    """torch keeps the scale of the int8 ELU in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ELU(), nn.Conv2d(4, 4, 3), nn.LeakyReLU(0.2), nn.PReLU(4))
        self.weight = nn.Parameter(torch.randn(3, 4))  # used by a function, not by a layer
        self.norm = nn.InstanceNorm2d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.elu(self.norm(self.net(x)))
        return torch.relu(nn.functional.linear(hidden, self.weight))


KINDS: dict[str, Any] = {
    "conv": lambda: Digits(ConvNet()),
    "direct": DirectDigits,
    "lstm": lambda: Digits(RowReader()),
    "untraceable": lambda: Digits(Branching()),
    "wrapped layer": lambda: Digits(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten(), nn.Softsign())),
    "activations": _Activations,
}


def answers_of_files() -> dict[str, Tensor]:
    """What the files of KINDS in this folder answer, read into models with other weights."""
    torch.manual_seed(123)
    with torch.no_grad():
        return {kind: load_quantized(f"{kind}.pt", make())(digits()[0][:50]) for kind, make in KINDS.items()}


def test_files_answer_the_same_in_a_fresh_process() -> None:
    expected = {}
    for kind, make in KINDS.items():
        int8, details = quantize_model(make(), digit_batches(2))
        save_quantized(int8, details.recipe, f"{kind}.pt")
        with torch.no_grad():
            expected[kind] = int8(digits()[0][:50])
    torch.testing.assert_close(answers_of_files(), expected, rtol=0, atol=0)
    program = "import torch, tests.compress.test_artefact as t; torch.save(t.answers_of_files(), 'answers')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    torch.testing.assert_close(torch.load("answers"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_are_read_again(kind: type[nn.Module], bidirectional: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(kind(8, 6, 2, bidirectional=bidirectional))

    x = torch.randn(5, 3, 8)
    int8, details = quantize_model(make(), [x])
    save_quantized(int8, details.recipe, tmp_path / "model.pt")
    torch.testing.assert_close(load_quantized(tmp_path, make())(x), int8(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_read_again(kind: type[nn.Module], tmp_path: Path) -> None:
    x = torch.randn(5, 8)
    int8, details = quantize_model(nn.Sequential(kind(8, 6)), [x])
    save_quantized(int8, details.recipe, tmp_path / "model.pt")
    torch.testing.assert_close(load_quantized(tmp_path, nn.Sequential(kind(8, 6)))(x), int8(x), rtol=0, atol=0)


@pytest.mark.parametrize("content", [b"", b"no model", b"PK\x03\x04 cut off", "pickle", "list", "halved"])
def test_any_other_file_is_a_clear_error(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if content == "pickle":
        torch.save(mlp(), path)  # code, which is never run
    elif content == "list":
        torch.save([1], path)
    elif content == "halved":
        int8, details = quantize_model(mlp(), digit_batches(1))
        save_quantized(int8, details.recipe, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(content)
    message = "has format None" if content == "list" else "is damaged or no quantized model"
    with pytest.raises(QuantizationError, match=message):
        load_quantized(path, mlp())


def test_the_file_holds_no_code_and_has_the_mode_of_any_other(tmp_path: Path) -> None:
    int8, details = quantize_model(Digits(RowReader()), digit_batches(1))
    save_quantized(int8, details.recipe, tmp_path / "new" / "model.pt")
    (tmp_path / "plain").touch()
    mode = stat.S_IMODE((tmp_path / "new" / "model.pt").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    content = torch.load(tmp_path / "new" / "model.pt", weights_only=True)
    assert sorted(content) == ["format", "numbers", "recipe", "recurrent", "state", "torch"]


def test_state_is_tensors_by_name() -> None:
    int8, _ = quantize_model(nn.Sequential(nn.LSTM(8, 6)), [torch.randn(5, 3, 8)])
    told = int8_state(int8)
    assert set(told["recurrent"]) == {"0"}
    assert all(isinstance(value, Tensor) for value in told["recurrent"]["0"].values())
    assert not any(isinstance(value, torch.ScriptObject) for value in told["state"].values())


def test_a_model_that_is_loaded_is_ready_for_inference(tmp_path: Path) -> None:
    int8, details = quantize_model(ConvNet(), digit_batches(1))
    save_quantized(int8, details.recipe, tmp_path / "model.pt")
    model = ConvNet().double().train()
    before = fingerprint(model)
    loaded = load_quantized(tmp_path, model)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert model.training
    assert fingerprint(model) == before
    with pytest.raises(FileNotFoundError, match=r"no quantized model at .*elsewhere.*report\.json says why"):
        load_quantized(tmp_path / "elsewhere", model)
