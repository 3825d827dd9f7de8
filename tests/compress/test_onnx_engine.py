"""Networks in ONNX Runtime: they answer as in torch, in int8 to the rounding of their scales, and say what is not."""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from lightning_speedkit.compress import onnx_engine
from lightning_speedkit.compress.calls import Call, first_sample, replay
from lightning_speedkit.compress.convert import convert_model
from lightning_speedkit.compress.engine import Converted, engine_named
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.onnx_module import OnnxModule
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Branching, ConvNet, Digits, DirectDigits, digit_batches, mlp


def _calls(batches: list[Any], name: str = "") -> list[Call]:
    return [Call(name, (batch,), {}) for batch in batches]


def _convert(
    net: nn.Module, calls: list[Call], engine: str = "static", **arguments: Any
) -> tuple[nn.Module, Converted]:
    floating = net if not net.training and not any(p.requires_grad for p in net.parameters()) else float_copy(net)
    return floating, engine_named(f"onnxruntime-{engine}").convert(floating, calls, **arguments)


def _error(floating: nn.Module, made: Converted, calls: list[Call]) -> float:
    return relative_error(replay(floating, calls), replay(made.module, calls))


def _graph(made: Converted) -> Any:
    (runner,) = [m for m in made.module.modules() if isinstance(m, OnnxModule)]
    return onnx.load_from_string(runner.graph)


CALLS = _calls(digit_batches())


@pytest.fixture(scope="module")
def conv_net() -> nn.Module:
    torch.manual_seed(0)
    net = ConvNet()
    for x in digit_batches():
        net.train()(x)  # running statistics that are not zero and one
    return float_copy(net)  # one object, so that the tests share its export


def test_a_conv_net_is_int8_throughout_and_one_sample_answers_as_in_a_batch(conv_net: nn.Module) -> None:
    calls = CALLS
    before = fingerprint(conv_net)
    floating, made = _convert(conv_net, calls)
    assert made.quantized == ("conv1", "conv2", "head")
    assert made.skipped == {}
    assert 0 < _error(floating, made, calls) < 0.03
    assert _error(floating, made, [first_sample(calls[0])]) < 0.05
    whole, single = replay(made.module, calls[:1])[0], replay(made.module, [first_sample(calls[0])])[0]
    torch.testing.assert_close(whole[:1], single, rtol=0, atol=1e-5)  # ranges are fixed, so the batch changes nothing
    assert not {"BatchNormalization"} & {node.op_type for node in _graph(made).graph.node}
    assert fingerprint(conv_net) == before


@pytest.mark.parametrize(("exact", "largest"), [(True, 127), (False, 64)])
def test_weights_are_the_float_ones_to_half_a_step(exact: bool, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_engine, "has_exact_int8", lambda: exact)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
    _, made = _convert(net, _calls(digit_batches()))
    kept = {value.name: numpy_helper.to_array(value) for value in _graph(made).graph.initializer}
    (weight,) = [value for value in kept.values() if value.dtype == numpy.int8 and value.ndim == 2]
    weight = weight if weight.shape == (32, 64) else weight.T
    assert numpy.abs(weight).max() == largest  # 7 bits where 8-bit products could overflow
    expected = net[1].weight.detach()
    steps = expected.abs().amax(dim=1, keepdim=True) / largest  # one scale per output channel
    assert bool(((torch.from_numpy(weight.copy()) * steps - expected).abs() <= steps * 0.501).all())
    assert made.recipe["full_range"] is exact


def test_attention_is_quantized_packed_projections_and_all() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = float_copy(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    calls = [Call("", (torch.randn(4, length, 32),), {}) for length in (6, 9)]
    names = [f"layers.{i}.{n}" for i in (0, 1) for n in ("self_attn", "self_attn.out_proj", "linear1", "linear2")]
    for engine in ("static", "dynamic"):
        floating, made = _convert(encoder, calls, engine)
        assert made.quantized == tuple(names)
        assert made.skipped == {}
        longer = [Call("", (torch.randn(3, 7, 32),), {})]  # another length and batch than any that was seen
        assert _error(floating, made, calls) < 0.04
        assert _error(floating, made, longer) < 0.06
    assert torch.backends.mha.get_fastpath_enabled()


class _Dicts(nn.Module):
    """Two inputs by keyword, one of them in a dict, a shared weight, three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.extra, self.twin = nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
        self.twin.weight = self.extra.weight
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor, *, extra: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        hidden = torch.relu(self.image(image)).mean((2, 3)) + self.twin(self.extra(extra["values"]))
        return {"logits": self.head(hidden) * scale, "hidden": [hidden, None], "index": hidden.argmax(1)}


def test_keyword_arguments_dicts_several_outputs_and_shared_weights() -> None:
    torch.manual_seed(0)
    net = _Dicts()
    batches = [{"image": x, "extra": {"values": torch.randn(32, 4)}, "scale": 2.0} for x in digit_batches()]
    floating, made = _convert(net, [Call("", (), batch) for batch in batches])
    assert made.quantized == ("image", "extra", "twin", "head")
    with torch.no_grad():
        expected, got = floating(**batches[0]), made.module(**batches[0])
    assert list(got) == ["logits", "hidden", "index"]
    assert got["hidden"][1] is None
    assert got["index"].dtype == torch.int64
    assert relative_error([expected["logits"], expected["hidden"][0]], [got["logits"], got["hidden"][0]]) < 0.05
    with pytest.raises(ValueError, match=r"_Dicts can only be called as .*: scale is 3.0, and was 2.0\."):
        made.module(**{**batches[0], "scale": 3.0})


def test_skipped_layers_keep_their_float_weights(conv_net: nn.Module) -> None:
    calls = CALLS
    floating = conv_net
    prepared = engine_named("onnxruntime-static").prepare(floating, calls)
    assert prepared.layers == ("conv1", "conv2", "head")
    errors = []
    for skip in ((), ["conv*"], ["conv*", "head"]):
        if len(skip) == 2:
            with pytest.raises(QuantizationError, match="No layer could be quantized: conv1: named in skip"):
                prepared.convert(skip)
            break
        made = prepared.convert(skip)
        errors.append(_error(floating, made, calls))
    assert made.quantized == ("head",)
    assert made.skipped == {"conv1": "named in skip", "conv2": "named in skip"}
    assert errors[1] < errors[0]


def test_dynamic_leaves_convolutions_in_float_and_says_so(conv_net: nn.Module) -> None:
    calls = CALLS
    floating, made = _convert(conv_net, calls, "dynamic")
    assert made.quantized == ("head",)
    assert set(made.skipped) == {"conv1", "conv2"}
    assert "no dynamic int8 version of the operators of Conv2d" in made.skipped["conv1"]
    assert _error(floating, made, calls) < 0.02


def test_lstm_is_dynamic_int8() -> None:
    from tests.compress.models import RowReader

    torch.manual_seed(0)
    floating, made = _convert(RowReader(), _calls(digit_batches()), "dynamic")
    assert made.quantized == ("rnn", "head")
    assert _error(floating, made, _calls(digit_batches())) < 0.03


def test_float32_is_the_same_network(conv_net: nn.Module) -> None:
    calls = CALLS
    floating, made = _convert(conv_net, calls, "float32")
    assert made.quantized == ()
    assert _error(floating, made, calls) < 1e-5


def test_what_cannot_be_exported_leaves_its_largest_parts_and_says_why() -> None:
    torch.manual_seed(0)
    calls = _calls(digit_batches())
    shown = io.StringIO()
    with redirect_stderr(shown), redirect_stdout(shown):
        floating, made = _convert(Branching(), calls)
    assert shown.getvalue() == ""  # torch prints the graph that it could not finish
    assert made.quantized == ("block.0", "block.2", "head")
    assert isinstance(made.module, Branching)
    assert [name for name, m in made.module.named_modules() if isinstance(m, OnnxModule)] == ["block", "head"]
    assert _error(floating, made, calls) < 0.05


class _Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() @ self.weight.numpy()) if x.sum() > 0 else x


def test_a_network_without_an_exportable_part_is_an_error_that_names_what_blocks_it() -> None:
    with pytest.raises(QuantizationError, match=r"No part of it can become an ONNX graph: the network: it cannot be"):
        _convert(_Opaque(), [Call("", (torch.ones(2, 4),), {})])


@pytest.mark.parametrize("make", [lambda: Digits(mlp()), DirectDigits])
def test_a_lightning_module_stays_one_and_its_copies_work(make: Any) -> None:
    torch.manual_seed(0)
    module = make().eval()
    calls = _calls(digit_batches(), "net" if type(module) is Digits else "")
    floating, made = _convert(module, calls)
    assert isinstance(made.module, type(module))
    twin = copy.deepcopy(made.module)
    x, labels = digit_batches()[0], torch.zeros(32, dtype=torch.int64)
    with torch.no_grad():
        loss, expected = twin.training_step((x, labels), 0), floating.training_step((x, labels), 0)
        torch.testing.assert_close(twin(x), made.module(x), rtol=0, atol=0)
    assert abs(float(loss - expected)) < 0.05 * float(expected)


def test_all_schemes_share_one_export(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    real = onnx_engine.find_parts
    monkeypatch.setattr(onnx_engine, "find_parts", lambda *a: (counted.append(1), real(*a))[1])
    floating, calls = float_copy(mlp()), _calls(digit_batches())
    for engine in ("static", "dynamic", "float32"):
        engine_named(f"onnxruntime-{engine}").prepare(floating, calls)
    assert len(counted) == 1
    with torch.no_grad():
        next(floating.parameters()).add_(1.0)  # other weights are another network
    made = engine_named("onnxruntime-float32").convert(floating, calls)
    assert len(counted) == 2
    assert _error(floating, made, calls) < 1e-5


def test_lazy_layers_are_refused_until_they_have_run() -> None:
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(QuantizationError, match=r"lazy layers without a shape \(1.weight.* Run it once"):
        convert_model(net, digit_batches())
    net(digit_batches()[0])
    assert convert_model(net, digit_batches()).engine == "onnxruntime-static"
