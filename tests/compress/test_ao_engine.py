"""torch.ao as an engine: which layers it takes, the numbers that it makes of them, and the file that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_speedkit.compress.ao_engine as ao_engine
from lightning_speedkit.compress.ao_engine import AoPrepared, AoState, missing, prepare
from lightning_speedkit.compress.artefact import load_quantized
from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.errors import QuantizationError


class _Net(nn.Module):
    """A convolution that can be int8, one that cannot, a recurrent and a Linear layer, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.ring = nn.Conv2d(2, 1, 3, padding=1, padding_mode="circular")
        self.rnn = nn.GRU(6, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.idle = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.ring(self.conv(x)).squeeze(1)
        result: Tensor = self.head(self.rnn(rows)[0][:, -1])
        return result


def _prepared(net: nn.Module, *batches: Tensor, scheme: str) -> AoPrepared:
    return prepare(float_copy(net), [Call("", (batch,), {}) for batch in batches], "cpu", scheme)


@pytest.mark.parametrize(
    ("scheme", "layers", "method"),
    [
        ("dynamic-int8", ("rnn", "head"), "dynamic"),
        ("static-int8", ("conv", "rnn", "head"), "static+dynamic"),
    ],
)
def test_the_layers_that_it_offers_are_those_that_it_quantizes(
    scheme: str, layers: tuple[str, ...], method: str
) -> None:
    prepared = _prepared(_Net(), torch.randn(3, 1, 8, 8), scheme=scheme)
    assert (prepared.layers, prepared.method) == (layers, method)
    made = prepared.convert()
    assert made.quantized == layers
    assert made.skipped["idle"] == "not called on the calibration batches"
    assert made.skipped.keys() | set(layers) == {"conv", "ring", "rnn", "head", "idle"}


def test_layers_without_a_convolution_are_all_static() -> None:
    prepared = _prepared(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(3, 4), scheme="static-int8")
    assert prepared.method == "static"
    made = prepared.convert()
    assert made.quantized == ("0",)
    assert [entry["name"] for entry in made.recipe["static"]]
    assert made.recipe["dynamic"] == []


def test_dynamic_weights_by_hand() -> None:
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        # one scale for all: 2.55 / 127.5
        layer.weight.copy_(torch.tensor([[2.55, -1.02, 0.0, 0.1], [-2.55, 0.5, 0.04, 1.0]]))
        layer.bias.copy_(torch.tensor([1.0, -1.0]))
    before = fingerprint(layer)
    made = _prepared(nn.Sequential(layer), torch.ones(1, 4), scheme="dynamic-int8").convert()
    assert (made.engine, made.scheme, made.quantized, made.formats) == (
        "torch-ao-dynamic", "dynamic-int8", ("0",), ("state_dict",),
    )  # fmt: skip
    int8: Any = made.module.get_submodule("0")
    assert int8.weight().int_repr().tolist() == [[127, -51, 0, 5], [-128, 25, 2, 50]]
    assert int8.weight().q_scale() == pytest.approx(0.02)
    # an input of ones is exact at every scale of its own: what is left is the sum of the weights
    (answer,) = replay(made.module, [Call("", (torch.ones(1, 4),), {})])
    expected = torch.tensor([[1.0 + 0.02 * (127 - 51 + 5), -1.0 + 0.02 * (-128 + 25 + 2 + 50)]])
    torch.testing.assert_close(answer, expected, rtol=0, atol=1e-4)
    assert fingerprint(layer) == before


def test_static_ranges_come_from_the_calls() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    made = _prepared(net, torch.linspace(-1.0, 2.0, 64).view(64, 1), scheme="static-int8").convert()
    x = torch.tensor([[0.5], [1.5], [2.0], [10.0], [-10.0]])
    answer = torch.cat(replay(made.module, [Call("", (x,), {})]))
    # inside of what was seen to a few steps of 3 / 127
    torch.testing.assert_close(answer[:3], x[:3], rtol=0, atol=0.06)
    # there are at most 256 steps, from -1 on: what is far outside is cut off
    assert float(answer[4]) == pytest.approx(-1.0, abs=0.06)
    assert 2.0 - 0.06 < float(answer[3]) < -1.0 + 256 * 3 / 127


def test_what_skip_names_stays_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = _prepared(net, torch.randn(3, 4), scheme="dynamic-int8").convert(["1"])
    assert (made.quantized, made.skipped) == (("0",), {"1": "named in skip"})
    assert torch.equal(made.module.get_parameter("1.weight"), net[1].weight)


def test_one_preparation_converts_several_times() -> None:
    prepared = _prepared(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4), scheme="dynamic-int8")
    before = fingerprint(prepared.floating)
    found = [prepared.convert(skip).quantized for skip in ((), ["0"], ["1"], ())]
    assert found == [("0", "1"), ("1",), ("0",), ("0", "1")]
    assert fingerprint(prepared.floating) == before
    assert prepared.layers == ("0", "1")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch reads its own int8 tensors so
@pytest.mark.parametrize("scheme", ["static-int8", "dynamic-int8"])
def test_its_file_is_read_into_a_network_of_other_weights(scheme: str, tmp_path: Path) -> None:
    x = torch.randn(3, 1, 8, 8)
    made = _prepared(_Net(), x, scheme=scheme).convert()
    artefact = made.artefacts["state_dict"]
    assert isinstance(artefact, AoState)
    assert artefact.write(tmp_path) == {"files": ["model.pt"]}
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert content["recipe"] == made.recipe
    other = load_quantized(tmp_path / "model.pt", _Net())
    calls = [Call("", (x,), {})]
    assert torch.equal(replay(other, calls)[0], replay(made.module, calls)[0])


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("cpu", "static-int8") is None

    def none() -> str:
        raise QuantizationError("This build of torch has no quantized engine.")

    monkeypatch.setattr(ao_engine, "quantized_engine", none)
    assert missing("cpu", "static-int8") == "This build of torch has no quantized engine."
    monkeypatch.setattr(ao_engine, "has_torch_ao", lambda: False)
    assert missing("cpu", "dynamic-int8") == (
        f"torch {torch.__version__} has no torch.ao.quantization any more: pip install 'lightning-speedkit[quant]'"
    )
