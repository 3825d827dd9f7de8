from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic as int8_dynamic

from lightning_speedkit.compress import quantize_model
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Branching, ConvNet, DirectDigits, RowReader, digits, mlp


def _relative(reference: Tensor, other: Tensor) -> float:
    return float((other - reference).norm() / reference.norm())


def _batches(count: int = 4) -> list[Tensor]:
    return list(digits()[0][: 32 * count].split(32))


def test_dynamic_weights_are_the_float_ones_to_half_a_step() -> None:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    int8, details = quantize_model(net, [digits()[0][:32].flatten(1)], backend="dynamic")
    assert details.backend == "dynamic"
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
    int8, details = quantize_model(conv, [x], backend="fx_static")
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
    int8, details = quantize_model(model, _batches())
    assert details.backend == "fx_static"
    assert set(details.layers_quantized) == {
        n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)
    }
    assert details.skipped == {}
    x = digits()[0][200:264]
    with torch.no_grad():
        assert _relative(model(x), int8(x)) < 0.06
    assert isinstance(int8, make)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in int8.modules())
    assert not any(isinstance(m, nn.Conv2d | nn.Linear) for m in int8.modules())


def test_forward_keeps_keywords_and_refuses_what_was_not_traced() -> None:
    model = DirectDigits().eval()
    x, mask = digits()[0][:32], torch.zeros(32, 10, dtype=torch.bool)
    mask[:, 3] = True
    int8, details = quantize_model(model, [{"x": x, "mask": mask}])
    assert details.backend == "fx_static"
    with torch.no_grad():
        torch.testing.assert_close(int8(x=x, mask=mask), int8(x, 1.0, mask), rtol=0, atol=0)
        assert float(int8(x, mask=mask)[:, 3].max()) < -1e8
        with pytest.raises(ValueError, match=r"was traced for the arguments .*'mask': '<tensor>'"):
            int8(x)
        with pytest.raises(ValueError, match=r"'scale': 2\.0"):
            int8(x, scale=2.0, mask=mask)
        with pytest.raises(TypeError, match="unexpected keyword argument 'masc'"):
            int8(x, masc=mask)


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
    batches = [{"image": x, "extra": {"values": torch.randn(32, 3)}} for x in _batches()]
    int8, details = quantize_model(model, batches)
    assert details.backend == "fx_static"
    assert details.layers_quantized == ("image", "extra", "head")
    with torch.no_grad():
        expected, got = model(**batches[0]), int8(**batches[0])
    assert list(got) == ["logits", "hidden"]
    assert max(_relative(expected[key], got[key]) for key in expected) < 0.06


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_net_becomes_dynamic(kind: type[nn.Module]) -> None:
    model = RowReader(kind).eval()
    int8, details = quantize_model(model, _batches())
    assert (details.backend, details.layers_quantized) == ("dynamic", ("rnn", "head"))
    with torch.no_grad():
        assert _relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.03


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_become_dynamic(cell: type[nn.Module]) -> None:
    model = cell(4, 6).eval()
    holder = nn.Sequential(model)
    x = torch.randn(5, 4)
    int8, details = quantize_model(holder, [x])
    assert details.layers_quantized == ("0",)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        assert _relative(first(holder(x)), first(int8(x))) < 0.03


def test_what_cannot_be_traced_is_quantized_in_the_parts_that_can() -> None:
    model = Branching().eval()
    int8, details = quantize_model(model, _batches())
    assert details.backend == "fx_static+dynamic"
    assert details.layers_quantized == ("block.0", "block.2", "head")
    with torch.no_grad():
        assert _relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.06
        assert int8(-digits()[0][:9]).shape == (9, 10)  # the other branch, decided by the values as before


class _Dangerous(nn.Module):
    """torch.fx traces it without complaint and gets another function: a proxy is no Tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: object) -> Tensor:
        assert x is not None
        factor = 3.0 if isinstance(x, Tensor) else 1.0
        return self.conv(x) * factor


def test_a_trace_that_computes_something_else_is_not_used() -> None:
    model = _Dangerous().eval()
    int8, details = quantize_model(model, _batches())
    with torch.no_grad():
        assert _relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.06
    assert details.layers_quantized == ("conv",)


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
            assert _relative(call(model)[:, keep], call(int8)[:, keep]) < 0.05
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
@pytest.mark.parametrize("backend", ["auto", "dynamic", "fx_static"])
def test_nothing_to_quantize_is_a_clear_error(model: nn.Module, x: Tensor, backend: str) -> None:
    with pytest.raises(QuantizationError, match=r"could not be quantized.*No layer could be made int8"):
        quantize_model(model, [x], backend=backend)


def test_single_layers_at_the_root() -> None:
    x = torch.randn(6, 8)
    for backend in ("auto", "dynamic", "fx_static"):
        layer = nn.Linear(8, 4)
        int8, details = quantize_model(layer, [x], backend=backend)
        assert len(details.layers_quantized) == 1
        with torch.no_grad():
            assert _relative(layer(x), int8(x)) < 0.03


def test_skip_leaves_the_named_layers_in_float() -> None:
    model = ConvNet().eval()
    int8, details = quantize_model(model, _batches(), skip=["head"])
    assert details.layers_quantized == ("conv1", "conv2")
    assert details.skipped == {"head": "named in skip"}
    assert type(int8.get_submodule("head")) is nn.Linear
    int8, details = quantize_model(mlp(), _batches(), skip=["1"])
    assert (details.layers_quantized, details.skipped) == (("3",), {"1": "named in skip"})
    with pytest.raises(QuantizationError, match="named in skip"):
        quantize_model(mlp(), _batches(), skip=["*"])


def test_layers_that_no_batch_reaches_stay_in_float_and_work() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool = False) -> Tensor:
            return self.unused(self.used(x)) if both else self.used(x)

    model, x = Optional().eval(), torch.randn(8, 4)
    int8, details = quantize_model(model, [x])
    assert details.layers_quantized == ("used",)
    assert details.skipped == {"unused": "not called on the calibration batches"}
    with torch.no_grad():
        assert _relative(model(x, both=True), int8(x, both=True)) < 0.05


def test_a_weight_that_is_read_directly_is_not_quantized_away() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.body(x), self.head.weight)

    model, x = Reads().eval(), torch.randn(8, 4)
    int8, details = quantize_model(model, [x])
    assert details.layers_quantized == ("body",)
    with torch.no_grad():
        assert _relative(model(x), int8(x)) < 0.05


def test_shared_layers_are_replaced_under_every_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    model, x = Tied().eval(), torch.randn(8, 6)
    int8, _ = quantize_model(model, [x])
    assert int8.first is int8.second
    assert isinstance(int8.first, int8_dynamic.Linear)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_quantized_from_float32(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    int8, details = quantize_model(model, [batch.to(dtype) for batch in _batches()])
    assert details.relative_error < 0.05
    assert next(model.parameters()).dtype == dtype
    assert int8(digits()[0][:4]).dtype == torch.float32


def test_source_and_process_are_left_as_found() -> None:
    model = ConvNet().train()
    model.conv1.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    random, engine = torch.get_rng_state(), torch.backends.quantized.engine
    batches = _batches()
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

    _, details = quantize_model(Noisy(), _batches())
    assert details.relative_error < 0.05


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'fx-static'.*Did you mean 'fx_static'"):
        quantize_model(mlp(), _batches(), backend="fx-static")
    with pytest.raises(ValueError, match="at least one batch"):
        quantize_model(mlp(), [])


def test_pruned_and_parametrized_weights_are_quantized_as_they_act() -> None:
    pruned = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.utils.prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    nn.utils.parametrizations.weight_norm(pruned[2])
    x = torch.randn(8, 16)
    int8, details = quantize_model(pruned, [x])
    assert details.layers_quantized == ("0", "2")
    zero = pruned[0].weight == 0
    assert int(zero.sum()) == 128
    assert bool((int8[0].weight().int_repr()[zero] == 0).all())
    assert hasattr(pruned[0], "weight_mask")
    with torch.no_grad():
        assert _relative(pruned(x), int8(x)) < 0.05


def test_compiled_modules_are_quantized_as_plain_ones() -> None:
    net = mlp()
    wrapped, in_place = torch.compile(mlp(), backend="eager"), mlp()
    in_place.compile(backend="eager")
    for model in (nn.Sequential(net), wrapped, nn.Sequential(torch.compile(mlp(), backend="eager")), in_place):
        int8, details = quantize_model(model, _batches(1))
        assert len(details.layers_quantized) == 2
        with torch.no_grad():
            assert _relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.05
