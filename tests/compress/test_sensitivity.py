"""What a rounding keeps of a weight, and which layers hurt most: against closed formulas and real int8 layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.sensitivity import expected_error, layer_errors, rounded_weight
from lightning_speedkit.compress.torch_ao import dynamic_layer
from tests.compress.models import RowReader, digit_batches, relative


def _calls(count: int = 2) -> list[Call]:
    return [Call("", (batch,), {}) for batch in digit_batches(count)]


@pytest.mark.parametrize(("scheme", "levels"), [("static-int8", 63), ("dynamic-int8", 63), ("weight-only-int8", 127)])
def test_int8_has_one_scale_per_output_channel(scheme: str, levels: int) -> None:
    weight = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5).view(
        5, 1, 1, 1
    )
    kept = rounded_weight(weight, scheme)
    for row, rounded in zip(weight, kept, strict=True):
        step = row.abs().max() / levels
        assert float((row - rounded).abs().max()) <= float(step) * 0.5001
        torch.testing.assert_close(rounded / step, (rounded / step).round(), rtol=0, atol=1e-3)
        assert float((row - rounded).abs().max()) > 0


def test_int4_has_one_scale_per_32_values_of_a_row_or_per_row() -> None:
    weight = torch.ones(2, 64)
    weight[0, 3], weight[0, 40] = 7.0, 14.0
    expected = torch.ones(2, 64)
    expected[0, 3], expected[0, 32:], expected[0, 40] = 7.0, 0.0, 14.0  # the second group has steps of 2: 0.5 goes to 0
    torch.testing.assert_close(rounded_weight(weight, "weight-only-int4"), expected)
    assert rounded_weight(torch.tensor([[7.0, 1.4]]), "weight-only-int4").tolist() == [[7.0, 1.0]]


def test_fp8_and_float32() -> None:
    weight = torch.tensor([[448.0, 17.0]])  # between 16 and 18, both of which fp8 has
    assert rounded_weight(weight, "fp8").tolist() == [[448.0, 16.0]]
    assert rounded_weight(weight, "float32").tolist() == weight.tolist()


def test_the_layer_whose_weights_are_least_fit_for_int8_hurts_most() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        net[3].weight[:, 0] *= 1000  # one value sets the scale of every row, and the others vanish
        net[1].weight[0], net[1].bias[0] = 0.0, 0.0  # and its input is nothing
    before = fingerprint(net)
    errors = layer_errors(float_copy(net), _calls(), ["1", "3", "5"])
    assert next(iter(errors)) == "3"
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors["3"] > 5 * errors["1"] > 0
    assert fingerprint(net) == before


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 10), lambda: RowReader().rnn], ids=["linear", "lstm"])
def test_the_expected_error_is_about_that_of_real_int8_layers(make: object) -> None:
    torch.manual_seed(0)
    layer = make().eval()  # type: ignore[operator]
    rows = digit_batches(1)[0].flatten(1) if isinstance(layer, nn.Linear) else digit_batches(1)[0].squeeze(1)
    calls = [Call("", (rows,), {})]
    expected = expected_error(float_copy(layer), calls, [""], "dynamic-int8")
    with torch.no_grad():
        float_out, real_out = layer(rows), dynamic_layer(layer)(rows)
    first = (float_out, real_out) if isinstance(float_out, torch.Tensor) else (float_out[0], real_out[0])
    assert relative(*first) / 4 < expected < relative(*first) * 6


def test_arguments_that_are_no_floats_pass_and_weights_come_back() -> None:
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)).eval()
    calls = [Call("", (torch.tensor([[0, 4]]),), {})]
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    errors = layer_errors(net, calls, ["0", "1"], scheme="weight-only-int4")
    assert all(0 < error < 0.5 for error in errors.values())
    torch.testing.assert_close(net.state_dict(), weights, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
