"""Each way in which a quantized copy is wrong without a word is planted, and caught by its name."""

from __future__ import annotations

import copy as copying
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.self_check import TRAPS, SelfCheck, check_copy
from lightning_speedkit.compress.torch_ao import convert_static, dynamic_layer, observe_static, quantized_engine
from tests.compress.fakes import answering
from tests.compress.models import ConvNet, digit_batches, mlp


def _calls(count: int = 2) -> list[Call]:
    return [Call("", (batch,), {}) for batch in digit_batches(count)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return float_copy(mlp())


def _changed(net: nn.Module, function: Callable[..., Any]) -> nn.Module:
    twin = copying.deepcopy(net)
    answering(function)(twin, ())
    return twin


def _check(net: nn.Module, twin: nn.Module, scheme: str = "static-int8") -> SelfCheck:
    found = check_copy(net, twin, _calls(), scheme=scheme, layers=("1", "3"))
    assert found.trap is None or (found.trap in TRAPS and found.message.startswith(f"{found.trap}: "))
    return found


def test_real_int8_layers_pass_and_their_errors_are_told() -> None:
    net = _net()
    twin = nn.Sequential(*(dynamic_layer(layer) if isinstance(layer, nn.Linear) else layer for layer in net))
    found = _check(net, twin.eval(), "dynamic-int8")
    assert found.passed
    (expected,) = (net(digit_batches(1)[0]),)
    with torch.no_grad():
        error = float((twin(digit_batches(1)[0]) - expected).norm() / expected.norm())
    assert found.error is not None
    assert found.error_one is not None
    assert found.error_expected is not None
    assert error / 2 < found.error < 2 * error + 1e-3
    assert 0 < found.error_expected < 0.05
    assert _check(net, net, "float32").passed


def _adds_8_bit_products_in_16_bits(layer: nn.Linear, rows: Tensor) -> Tensor:
    """A linear layer as AVX2 computes it without reduced weights: pairs of u8 x s8 products are cut at 16 bits."""
    low, high = float(rows.min().clamp(max=0)), float(rows.max().clamp(min=0))
    step = (high - low) / 255
    zero = round(-low / step)
    inputs = (rows / step).round().add(zero).clamp(0, 255).numpy().astype(numpy.int64)
    scale = layer.weight.abs().amax(1, keepdim=True) / 127
    weight = (layer.weight / scale).round().numpy().astype(numpy.int64)
    products = inputs[:, None, :] * weight[None]
    pairs = numpy.clip(products[..., 0::2] + products[..., 1::2], -(2**15), 2**15 - 1)
    sums = torch.from_numpy(pairs.sum(-1) - zero * weight.sum(1)).float()
    return sums * step * scale.squeeze(1) + layer.bias


def test_saturation() -> None:
    net = _net()
    with torch.no_grad():  # as after training with large weights of one sign, which makes sums of two overflow
        net[1].weight.abs_()
        net[3].weight.abs_()

    def saturated(twin: Any, plain: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(_adds_8_bit_products_in_16_bits(twin[1], x.flatten(1)))
        return _adds_8_bit_products_in_16_bits(twin[3], hidden)

    found = _check(net, _changed(net, saturated))
    assert found.trap == "saturation"
    assert "reduce_range" in found.message
    assert found.error is not None
    assert 0.05 < found.error < 0.9


@pytest.mark.skipif(not hasattr(torch.cpu, "_is_vnni_supported"), reason="torch does not tell")
def test_saturation_of_onnxruntime_without_reduced_weights(tmp_path: Any) -> None:
    if torch.cpu._is_vnni_supported():
        pytest.skip("this CPU adds products of 8 bits in 32")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    net = _net()
    with torch.no_grad():
        net[1].weight.abs_()
        net[3].weight.abs_()
    helper, numbers = onnx.helper, onnx.numpy_helper
    weights = {name: value.numpy() for name, value in net.state_dict().items()}
    kept = [numbers.from_array(numpy.ascontiguousarray(v.T if v.ndim > 1 else v), n) for n, v in weights.items()]
    nodes = [
        helper.make_node("Gemm", ["x", "1.weight", "1.bias"], ["a"], "one"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "3.weight", "3.bias"], ["y"], "two"),
    ]
    ports = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", size]) for n, size in (("x", 64), ("y", 10))
    ]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, tmp_path / "float.onnx")

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter([{"x": batch.flatten(1).numpy()} for batch in digit_batches(2)])

        def get_next(self) -> Any:
            return next(self.rows, None)

    def quantized(reduce_range: bool) -> nn.Module:
        path = str(tmp_path / f"{reduce_range}.onnx")
        quantize_static(
            str(tmp_path / "float.onnx"), path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
            reduce_range=reduce_range, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return _changed(net, lambda _, __, x: torch.from_numpy(session.run(None, {"x": x.flatten(1).numpy()})[0]))

    assert _check(net, quantized(True)).passed
    assert _check(net, quantized(False)).trap == "saturation"


def test_no_calibration_of_torch_s_own_observers() -> None:
    torch.manual_seed(0)
    net = float_copy(ConvNet())
    calls = [Call("", (batch / 4,), {}) for batch in digit_batches(2)]

    def quantized(calibrate: bool) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it, if warnings are not filtered
            prepared = observe_static(copying.deepcopy(net), engine=quantized_engine())
            for call in calls if calibrate else ():
                prepared(*call.args)
            return convert_static(prepared)

    layers = ("conv1", "conv2", "head")
    assert check_copy(net, quantized(True), calls, scheme="static-int8", layers=layers).passed
    assert check_copy(net, quantized(False), calls, scheme="static-int8", layers=layers).trap == "no calibration"


def test_no_calibration_where_outputs_do_not_depend_on_the_input() -> None:
    net = _net()
    mean = net(digit_batches(1)[0]).mean(0)
    assert _check(net, _changed(net, lambda _, __, x: mean.expand(len(x), -1))).trap == "no calibration"
    assert _check(net, _changed(net, lambda _, __, x: torch.zeros(len(x), 10))).trap == "no calibration"


def test_in_place_corruption_of_the_float_model() -> None:
    net = _net()

    def writes(twin: Any, plain: Any, x: Tensor) -> Tensor:
        answer = plain(x)
        if len(x) == 1:  # a frozen constant that is summed into in place where shapes match
            net[3].bias.data.add_(answer[0])
        return answer

    found = _check(net, _changed(net, writes))
    assert found.trap == "in-place corruption"
    assert "float model" in found.message


def test_in_place_corruption_of_the_copy() -> None:
    net = _net()

    def writes(twin: Any, plain: Any, x: Tensor) -> Tensor:
        answer = plain(x)
        if len(x) == 1:
            twin[3].bias.data.add_(1)
        return answer

    assert "its own weights" in _check(net, _changed(net, writes)).message


@pytest.mark.parametrize("when", ["second", "after one sample"])
def test_in_place_corruption_of_what_no_hash_sees(when: str) -> None:
    net, calls = _net(), []

    def drifts(twin: Any, plain: Any, x: Tensor) -> Tensor:
        calls.append(len(x))
        moved = len(calls) > 2 if when == "second" else 1 in calls and len(x) > 1
        return plain(x) + 0.001 * moved

    found = _check(net, _changed(net, drifts))
    assert found.trap == "in-place corruption"
    assert "differently" in found.message


def test_a_network_that_draws_random_numbers_is_not_corrupt() -> None:
    net = nn.Sequential(mlp()).eval()
    noise = torch.Generator().manual_seed(0)

    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-4 * torch.rand(1, generator=noise)

    noisy = Noisy(*net).eval()
    assert check_copy(noisy, net, _calls(), scheme="static-int8", layers=("0.1",)).passed


@pytest.mark.parametrize("how", ["raises", "shape", "value", "second time"])
def test_batch_1(how: str) -> None:
    net, seen = _net(), []

    def wrong(twin: Any, plain: Any, x: Tensor) -> Tensor:
        answer = plain(x)
        if len(x) > 1:
            return answer
        seen.append(1)
        if how == "raises":
            raise RuntimeError("a shape that was fixed")
        if how == "shape":
            return answer.squeeze(0)
        return answer * (2 if how == "value" else 1) + (0.001 * len(seen) if how == "second time" else 0)

    found = _check(net, _changed(net, wrong))
    assert found.trap == "batch 1"


def test_a_network_that_needs_a_full_batch_is_not_asked_for_one_sample() -> None:
    def full(twin: Any, plain: Any, x: Tensor) -> Tensor:
        assert len(x) > 1
        return plain(x)

    net = _changed(_net(), full)
    found = _check(net, net)
    assert found.passed
    assert found.error_one is None


@pytest.mark.parametrize(
    ("function", "scheme", "words"),
    [
        (lambda twin, plain, x: plain(x) / 0, "static-int8", "not finite"),
        (lambda twin, plain, x: plain(x)[:, :3], "static-int8", "not finite"),
        (lambda twin, plain, x: plain(x, x), "static-int8", "cannot be run"),
        (lambda twin, plain, x: plain(x) * 1.01, "float32", "relative error"),
        (lambda twin, plain, x: plain(x) * 1.3, "weight-only-int8", "relative error"),
    ],
    ids=["infinite", "shape", "raises", "float32", "no activations"],
)
def test_wrong_outputs(function: Any, scheme: str, words: str) -> None:
    net = _net()
    found = _check(net, _changed(net, function), scheme)
    assert found.trap == "wrong outputs"
    assert words in found.message


def test_a_copy_whose_weights_cannot_be_hashed_is_still_compared() -> None:
    net = _net()
    twin = copying.deepcopy(net)
    twin.register_buffer("sparse", torch.eye(2).to_sparse())
    assert _check(net, twin).passed


def test_nan_is_told_by_its_name_whoever_answers_with_it() -> None:
    net = _net()
    found = _check(net, _changed(net, lambda _, plain, x: plain(x) * float("nan")))
    assert (found.trap, found.message) == ("wrong outputs", "wrong outputs: its outputs are not finite")
    with torch.no_grad():
        net[1].bias.fill_(float("nan"))  # type: ignore[index, union-attr, operator]
    found = _check(net, copying.deepcopy(net))
    assert (found.trap, "the float model itself answers with NaN" in found.message) == ("wrong outputs", True)
