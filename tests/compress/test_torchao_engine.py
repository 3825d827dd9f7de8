"""torchao's weights: rounded as their formula says, kept as plain tensors, and honest about what stays in float."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.artefact import load_quantized
from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.engine import Converted, engine_named
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.torchao_state import inner_tensors, pack_int4, unpack_int4
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import digit_batches


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def _convert(net: nn.Module, bits: int, **arguments: list[str]) -> Converted:
    calls = [Call("", (batch,), {}) for batch in digit_batches(2)]
    return engine_named(f"torchao-weight-int{bits}").convert(float_copy(net), calls, **arguments)


def test_int8_weights_are_the_float_ones_to_half_a_step() -> None:
    net = _net()
    before = fingerprint(net)
    made = _convert(net, 8)
    assert made.quantized == ("1", "3")
    for index in (1, 3):
        weight = net[index].weight.detach()
        parts = inner_tensors(made.module.get_submodule(str(index)).weight)  # type: ignore[arg-type]
        steps = weight.abs().amax(dim=1, keepdim=True) / 127.5  # one scale per output channel
        rebuilt = parts["qdata"] * parts["scale"].reshape(-1, 1)
        assert parts["qdata"].dtype == torch.int8
        assert bool(((rebuilt - weight).abs() <= steps * 0.51).all())
    assert fingerprint(net) == before


def test_int4_takes_layers_whose_width_is_a_multiple_of_its_group() -> None:
    made = _convert(_net(), 4)
    assert made.quantized == ("1",)
    assert made.skipped == {"3": "its 48 inputs do not divide into groups of 32"}
    values = inner_tensors(made.module.get_submodule("1").weight)["qdata"]  # type: ignore[arg-type]
    assert int(values.min()) >= -8
    assert int(values.max()) <= 7


def test_packing_is_exact_for_every_pair() -> None:
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    packed = pack_int4(values)
    assert packed.shape == (256, 1)
    assert torch.equal(unpack_int4(packed), values)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", ["state_dict", "pt2"])
def test_what_is_read_again_answers_the_same(bits: int, form: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    made = _convert(net, bits)
    made.save(tmp_path, [form])
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    again = load_quantized(tmp_path, fresh if form == "state_dict" else None)
    calls = [Call("", (batch,), {}) for batch in (digit_batches(1)[0], digit_batches(1)[0][:1])]
    for expected, got in zip(replay(made.module, calls), replay(again, calls), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    if form == "state_dict":
        content = torch.load(tmp_path / "model.pt", weights_only=True)  # without torchao's classes in it
        assert type(content["inner"]["1.weight"]["qdata"]) is torch.Tensor
        weights = 64 * 256 * 2 * (1 if bits == 8 else 0.5)
        assert (tmp_path / "model.pt").stat().st_size < weights + 16_000


def test_attention_convolutions_and_shared_weights_stay_in_float_with_a_reason() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.attend = nn.Embedding(20, 32), nn.MultiheadAttention(32, 4, batch_first=True)
            self.mix, self.scores = nn.Linear(32, 32), nn.Linear(32, 20, bias=False)
            self.scores.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.words(x)
            scores: torch.Tensor = self.scores(self.mix(self.attend(hidden, hidden, hidden)[0]))
            return scores

    made = engine_named("torchao-weight-int8").convert(
        float_copy(Net()), [Call("", (torch.randint(0, 20, (4, 6)),), {})]
    )
    assert made.quantized == ("mix",)
    assert made.skipped["attend"] == "its projections are raw parameters, which torchao does not quantize"
    assert made.skipped["scores"] == "its weight is shared with words, which stays in float"
    assert "this is a Embedding" in made.skipped["words"]


def test_nothing_to_quantize_and_a_state_of_another_shape_are_errors(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"No layer can be quantized by torchao \(0: torchao quantizes Linear"):
        engine_named("torchao-weight-int8").convert(
            nn.Sequential(nn.Conv2d(1, 1, 1)).eval(), [Call("", (torch.ones(1, 1, 2, 2),), {})]
        )
    with pytest.raises(QuantizationError, match="all of them are skipped"):
        _convert(_net(), 8, skip=["1", "3"])
    _convert(_net(), 8).save(tmp_path)
    with pytest.raises(QuantizationError, match=r"does not fit a Sequential like this one"):
        load_quantized(tmp_path, nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))


def test_log_levels_are_as_before() -> None:
    names = ("torchao", "torch.utils._pytree", "torch.onnx", "torch.export")
    before = [logging.getLogger(name).level for name in names]
    _convert(_net(), 8)
    assert [logging.getLogger(name).level for name in names] == before
