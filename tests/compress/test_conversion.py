"""A module becomes an int8 copy that answers as it does, or a clear error."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic as int8_dynamic

from lightning_speedkit.compress import quantize_model
from lightning_speedkit.compress.calls import (
    Call,
)
from lightning_speedkit.compress.conversion import details_of, methods_of, on_cpu
from lightning_speedkit.compress.int8 import Int8Model
from lightning_speedkit.compress.torch_ao import (
    is_quantized,
)
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import (
    ConvNet,
    DirectDigits,
    RowReader,
    digit_batches,
    digits,
    mlp,
    relative,
)


def test_dynamic_weights_are_the_float_ones_to_half_a_step() -> None:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    int8, details = quantize_model(net, [digits()[0][:32].flatten(1)], backend="torch-ao-dynamic")
    assert details.backend == "torch-ao-dynamic"
    assert details.layers_quantized == ("0", "2")
    for index in (0, 2):
        weight, layer = net[index].weight, int8[index]
        # symmetric, one scale per tensor: 127.5 steps up to the largest magnitude
        scale = float(weight.detach().abs().max()) / 127.5
        assert isinstance(layer, int8_dynamic.Linear)
        assert layer.weight().q_scale() == pytest.approx(scale, rel=1e-6)
        # half a step for rounding; the one largest positive value clips to 127 steps, half a step lower
        assert float((layer.weight().dequantize() - weight.detach()).abs().max()) <= scale * 0.5001
        torch.testing.assert_close(layer.bias(), net[index].bias, rtol=0, atol=0)


def test_static_convolution_matches_the_formula_of_its_scales() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3)
    x = digits()[0][:64]
    int8, details = quantize_model(conv, [x], backend="torch-ao-static")
    assert details.layers_total == 1
    assert len(details.layers_quantized) == 1
    layer = int8[0] if isinstance(int8, nn.Sequential) else int8
    weight = layer.weight().dequantize()
    per_channel = conv.weight.detach().abs().amax(dim=(1, 2, 3)) / 127.5
    assert bool(((weight - conv.weight.detach()).abs().amax(dim=(1, 2, 3)) <= per_channel * 0.5001).all())
    with torch.no_grad():
        expected, got = conv(x), int8(x)
    # output rounded to its own scale, input to 1/127 of its range through at most nine weights, weights to half a step
    bound = (
        layer.scale
        + float(conv.weight.detach().abs().sum(dim=(1, 2, 3)).max()) / 127
        + 9 * float(per_channel.max()) / 2
    )
    assert float((expected - got).abs().max()) <= bound


@pytest.mark.parametrize("make", [ConvNet, DirectDigits])
def test_conv_net_runs_in_int8_as_one_part(make: type[nn.Module]) -> None:
    model = make().eval()
    with torch.no_grad():
        for _ in range(3):  # running statistics that are not zero and one
            model.train()(digits()[0][:64])
    model.eval()
    int8, details = quantize_model(model, digit_batches())
    assert details.backend == "torch-ao-static"
    assert set(details.layers_quantized) == {
        n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)
    }
    assert details.skipped == {}
    x = digits()[0][200:264]
    with torch.no_grad():
        assert relative(model(x), int8(x)) < 0.06
    assert isinstance(int8, make)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in int8.modules())
    assert not any(isinstance(m, nn.Conv2d | nn.Linear) for m in int8.modules())


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.extra = nn.Conv2d(1, 4, 3), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.relu(self.image(image)).mean((2, 3)) + self.extra(extra["values"])
        return {"logits": self.head(hidden), "hidden": hidden}


def test_two_inputs_in_a_dict_and_two_outputs() -> None:
    model = _TwoInputs().eval()
    batches = [{"image": x, "extra": {"values": torch.randn(32, 3)}} for x in digit_batches()]
    int8, details = quantize_model(model, batches)
    assert details.backend == "torch-ao-static"
    assert details.layers_quantized == ("image", "extra", "head")
    with torch.no_grad():
        expected, got = model(**batches[0]), int8(**batches[0])
    assert list(got) == ["logits", "hidden"]
    assert max(relative(expected[key], got[key]) for key in expected) < 0.06


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_net_becomes_dynamic(kind: type[nn.Module]) -> None:
    model = RowReader(kind).eval()
    int8, details = quantize_model(model, digit_batches())
    assert (details.backend, details.layers_quantized) == ("torch-ao-dynamic", ("rnn", "head"))
    with torch.no_grad():
        assert relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.03


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_become_dynamic(cell: type[nn.Module]) -> None:
    model = cell(4, 6).eval()
    holder = nn.Sequential(model)
    x = torch.randn(5, 4)
    int8, details = quantize_model(holder, [x])
    assert details.layers_quantized == ("0",)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        assert relative(first(holder(x)), first(int8(x))) < 0.03


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder_does_not_crash(padded: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(5, 5, 16)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:, 3:] = padded
    batch = {"src": x, "src_key_padding_mask": mask} if padded else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        int8, details = quantize_model(model, [batch])
        assert details.layers_quantized == (
            "layers.0.linear1",
            "layers.0.linear2",
            "layers.1.linear1",
            "layers.1.linear2",
        )
        assert set(details.skipped) == {f"layers.{i}.self_attn{end}" for i in (0, 1) for end in ("", ".out_proj")}
        with torch.no_grad():
            call = (lambda m: m(x, src_key_padding_mask=mask)) if padded else (lambda m: m(x))
            keep = slice(0, 3) if padded and batch_first else slice(None)
            assert relative(call(model)[:, keep], call(int8)[:, keep]) < 0.05
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.ReLU(), torch.randn(2, 3)),
        (nn.Embedding(5, 3), torch.tensor([[1, 2]])),
        (nn.Sequential(nn.LSTM(3, 4, bias=False)), torch.randn(2, 2, 3)),
        (nn.Sequential(nn.LSTM(3, 4, proj_size=2)), torch.randn(2, 2, 3)),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), torch.randn(2, 1, 8, 8)),
    ],
    ids=["no weight", "embedding", "no bias", "projection", "circular"],
)
@pytest.mark.parametrize("backend", ["auto", "torch-ao-dynamic", "torch-ao-static"])
def test_nothing_to_quantize_is_a_clear_error(model: nn.Module, x: Tensor, backend: str) -> None:
    with pytest.raises(QuantizationError, match=r"could not be quantized.*No layer could be made int8"):
        quantize_model(model, [x], backend=backend)


def test_single_layers_at_the_root() -> None:
    x = torch.randn(6, 8)
    for backend in ("auto", "torch-ao-dynamic", "torch-ao-static"):
        layer = nn.Linear(8, 4)
        int8, details = quantize_model(layer, [x], backend=backend)
        assert len(details.layers_quantized) == 1
        with torch.no_grad():
            assert relative(layer(x), int8(x)) < 0.03


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_quantized_from_float32(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    int8, details = quantize_model(model, [batch.to(dtype) for batch in digit_batches()])
    assert details.relative_error < 0.05
    assert next(model.parameters()).dtype == dtype
    assert int8(digits()[0][:4]).dtype == torch.float32


def test_source_and_process_are_left_as_found() -> None:
    model = ConvNet().train()
    model.conv1.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    random, engine = torch.get_rng_state(), torch.backends.quantized.engine
    batches = digit_batches()
    kept = [batch.clone() for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of torch's quantization reaches the user
        filters = list(warnings.filters)
        quantize_model(model, batches)
        assert warnings.filters == filters
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == grad
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(batches, kept, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), random, rtol=0, atol=0)
    assert torch.backends.quantized.engine == engine
    assert torch.is_grad_enabled()


def test_a_model_that_writes_into_its_input_is_calibrated_on_the_input() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(10)
            return self.fc(x)

    model, x = Writes(), torch.ones(2, 4)
    _, details = quantize_model(model, [x])
    assert torch.equal(x, torch.ones(2, 4))
    assert details.relative_error < 0.05


def test_random_layers_are_compared_on_the_same_random_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.flatten(1)) + torch.randn(len(x), 64)

    _, details = quantize_model(Noisy(), digit_batches())
    assert details.relative_error < 0.05


def test_bad_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"one of 'auto', 'torch-ao-static', 'torch-ao-dynamic', got 'torch_ao_static'.*'torch-ao-static'",
    ):
        quantize_model(mlp(), digit_batches(), backend="torch_ao_static")
    with pytest.raises(ValueError, match="at least one batch"):
        quantize_model(mlp(), [])


def _call(x: Tensor) -> list[Call]:
    return [Call("", (x,), {})]


class _Misbehaves(nn.Module):
    """Does something else as soon as a layer of it is int8."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.fc, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return self.what(out) if is_quantized(self.fc) else out


def _fails(out: Tensor) -> Tensor:
    raise LookupError("no int8 here")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (_fails, r"The int8 copy cannot be run \(LookupError: no int8 here\)"),
        (lambda out: out * 0, r"The int8 copy computes something else \(relative error 1\)"),
        (lambda out: out * math.nan, r"computes something else \(relative error inf\)"),
        (lambda out: out[:1], r"computes something else \(relative error inf\)"),
        (lambda out: out + next(_COUNT) * 1e-3, "answers the same batch differently the second time"),
        (lambda out: out if len(out) > 1 else _fails(out), "cannot be run on one sample, which the float model can"),
        (lambda out: out if len(out) > 1 else out / 0, "cannot be run on one sample, which the float model can"),
        (lambda out: out if len(out) > 1 else -out, r"is wrong on one sample \(relative error 2"),
    ],
    ids=["fails", "zeros", "nan", "shape", "moody", "fails on one", "infinite on one", "wrong on one"],
)
def test_an_int8_copy_that_fails_its_check_is_not_given_out(what: Any, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize_model(_Misbehaves(what), [torch.randn(8, 4)])


_COUNT = iter(range(1000))


def test_a_network_that_needs_a_full_batch_is_checked_on_full_batches() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) > 1
            return self.fc(x)

    _, details = quantize_model(Full(), [torch.randn(8, 4)])
    assert details.layers_quantized == ("fc",)


def test_logits_that_are_masked_out_are_no_difference() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).masked_fill(torch.tensor([True, False, False, False]), -math.inf)

    _, details = quantize_model(Masks(), [torch.randn(8, 4)])
    assert details.relative_error < 0.05


def test_a_source_that_changes_is_an_error() -> None:
    class Shared:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.shared = Shared(self.fc.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            self.shared.weight.add_(1)
            return self.fc(x)

    with pytest.raises(QuantizationError, match="The float model changed while it was quantized"):
        quantize_model(Changes(), [torch.randn(8, 4)])


@pytest.mark.parametrize(
    ("model", "backend", "methods"),
    [
        (nn.Conv1d(1, 1, 1), "auto", ["static+dynamic", "dynamic"]),
        (nn.Linear(1, 1), "auto", ["dynamic"]),
        (nn.Linear(1, 1), "torch-ao-static", ["static"]),
        (nn.LSTM(1, 1), "torch-ao-static", ["static+dynamic"]),
        (nn.Conv1d(1, 1, 1), "torch-ao-dynamic", ["dynamic"]),
    ],
)
def test_methods_of_a_backend(model: nn.Module, backend: str, methods: list[str]) -> None:
    assert methods_of(model, backend) == methods


def test_details_name_the_methods_that_were_used() -> None:
    recipe = {"engine": "x86", "static": [{}], "dynamic": ["b"]}
    details = details_of(Int8Model(nn.ReLU(), recipe, ("a", "b"), {"c": "why"}), 0.25)
    assert (details.backend, details.engine, details.layers_total) == ("torch-ao-static", "x86", 3)
    assert (details.skipped, details.relative_error) == ({"c": "why"}, 0.25)
    assert "recipe" not in repr(details)


class _MovesItself:
    """Moves itself in place, as the BatchEncoding of transformers does."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.device = values, "accelerator"

    def to(self, device: Any) -> _MovesItself:
        self.device = str(device)
        return self


@dataclasses.dataclass(frozen=True)
class _Frozen:
    values: Tensor


def test_a_batch_is_copied_and_the_one_in_training_left_alone() -> None:
    half, whole = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.long)
    own, frozen = _MovesItself(torch.ones(2)), _Frozen(torch.ones(2))
    batch = {
        "x": [half, whole],
        "own": own,
        "frozen": frozen,
        "text": "a",
        "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1, dtype=torch.float64)]),
    }
    copied = on_cpu(batch)
    assert [tensor.dtype for tensor in copied["x"]] == [torch.float32, torch.long]
    assert copied["packed"].data.dtype == torch.float32
    assert (own.device, copied["own"].device) == ("accelerator", "cpu")
    assert copied["text"] == "a"
    assert isinstance(copied["frozen"], _Frozen)
    half.zero_()
    whole.zero_()
    own.values.zero_()
    assert all(bool(tensor.all()) for tensor in (*copied["x"], copied["own"].values))


def test_tensors_with_a_history_are_copied_without_it() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    copied = on_cpu([x])[0]
    assert copied.grad_fn is None
    torch.testing.assert_close(copied, torch.full((2,), 2.0), rtol=0, atol=0)
