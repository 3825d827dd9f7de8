"""Int8 graphs of ONNX, made from small ones written by hand, with weights and ranges whose int8 is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, shape_inference

from lightning_speedkit.compress.onnx_graph import OnnxGraph
from lightning_speedkit.compress.onnx_module import new_session
from lightning_speedkit.compress.onnx_quantize import dynamic_int8, measured_ranges, quantized_numbers, static_int8

W = numpy.array([[1.0, -0.5], [0.25, 2.0]], dtype=numpy.float32)
V = numpy.array([[1.0], [-4.0]], dtype=numpy.float32)
INPUTS = [[torch.tensor([[1.0, 2.0], [-1.0, 0.5]])], [torch.tensor([[3.0, -1.0]])]]
X = numpy.array([[1.0, 2.0], [-1.0, 0.5], [3.0, -1.0]], dtype=numpy.float32)
# the largest weight of each column is 127 (or 64, to 7 bits), and the others are rounded: 31.75, 31.75 and 16
INT8 = {False: ([[127, -32], [32, 127]], [[32], [-127]]), True: ([[64, -16], [16, 64]], [[16], [-64]])}


def _model(nodes: Sequence[Any], values: dict[str, Any], kind: int = TensorProto.FLOAT, width: int = 2) -> Any:
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [helper.make_tensor_value_info("input_0", kind, ["n", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return shape_inference.infer_shapes(model)


def _two_layers() -> OnnxGraph:
    """``relu(x @ W) @ V``."""
    nodes = [
        helper.make_node("MatMul", ["input_0", "w"], ["h"], name="layer0@0"),
        helper.make_node("Relu", ["h"], ["r"], name="n1_Relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], name="layer1@2"),
    ]
    return OnnxGraph(_model(nodes, {"w": W, "v": V}), [("first",), ("second",)])


def _floating(x: Any = X) -> Any:
    return numpy.maximum(x @ W, 0) @ V


def _constants(graph: bytes) -> dict[str, Any]:
    return {value.name: numpy_helper.to_array(value) for value in onnx.load_from_string(graph).graph.initializer}


def _numbers(graph: bytes) -> set[int]:
    return quantized_numbers(onnx.load_from_string(graph))


def _answer(graph: bytes, x: Any = X) -> Any:
    return new_session(graph).run(None, {"input_0": x})[0]


@pytest.fixture(scope="module")
def ranges() -> Any:
    return measured_ranges(_two_layers(), INPUTS)


def test_ranges_are_the_extremes_over_all_calls(ranges: Any) -> None:
    # x @ W: (1.5, 3.5), (-0.875, 1.5), (2.75, -3.5); after the ReLU times V: -12.5, -6, 2.75
    found = {name: tuple(float(end[0]) for end in value.range_value) for name, value in ranges.items()}
    assert found == {"input_0": (-1.0, 3.0), "h": (-3.5, 3.5), "r": (0.0, 3.5), "y": (-12.5, 2.75)}


@pytest.mark.parametrize("reduce_range", [False, True])
def test_static_int8_is_worked_out_by_hand(ranges: Any, reduce_range: bool) -> None:
    graph = static_int8(_two_layers(), ranges, (), reduce_range=reduce_range)
    kept = _constants(graph)
    first, second = INT8[reduce_range]
    assert kept["w_quantized"].tolist() == first
    assert kept["v_quantized"].tolist() == second
    top = 64 if reduce_range else 127
    numpy.testing.assert_allclose(kept["w_scale"], [1 / top, 2 / top], rtol=1e-6)
    assert float(kept["input_0_scale"]) == pytest.approx(4 / 255)
    assert int(kept["input_0_zero_point"]) == 64  # round(255 / 4)
    assert _numbers(graph) == {0, 1}
    x, r, y = 4 / 255, 3.5 / 255, 15.25 / 255
    hidden = (numpy.clip(numpy.round(X / x) + 64, 0, 255) - 64) * x @ (numpy.array(first) * [1 / top, 2 / top])
    hidden = numpy.clip(numpy.round(hidden / r), 0, 255) * r
    expected = hidden @ (numpy.array(second) * 4 / top)
    expected = (numpy.clip(numpy.round(expected / y) + 209, 0, 255) - 209) * y  # round(12.5 / y) is 209
    numpy.testing.assert_allclose(_answer(graph), expected, atol=y * 1.01)  # a tie may go either way
    assert not numpy.array_equal(_answer(graph), _floating())


@pytest.mark.parametrize("reduce_range", [False, True])
def test_dynamic_int8_measures_each_call(reduce_range: bool) -> None:
    graph = dynamic_int8(_two_layers(), (), reduce_range=reduce_range)
    first, second = INT8[reduce_range]
    assert _constants(graph)["w_quantized"].tolist() == first
    assert _constants(graph)["v_quantized"].tolist() == second
    assert _numbers(graph) == {0, 1}
    top = 64 if reduce_range else 127
    for factor in (1.0, 1000.0):  # a range that was measured before would cut the second off
        expected = _dynamic(_dynamic(X * factor, numpy.array(first) * [1 / top, 2 / top]).clip(min=0),
                            numpy.array(second) * 4 / top)  # fmt: skip
        numpy.testing.assert_allclose(_answer(graph, X * numpy.float32(factor)), expected, atol=0.07 * factor)
        assert numpy.abs(_answer(graph, X * numpy.float32(factor)) - _floating(X) * factor).max() < 0.4 * factor


def _dynamic(x: Any, weight: Any) -> Any:
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = (high - low) / 255
    zero = numpy.round(-low / scale)
    return (numpy.clip(numpy.round(x / scale) + zero, 0, 255) - zero) * scale @ weight


@pytest.mark.parametrize("kept", [0, 1])
def test_a_layer_that_is_kept_has_its_float_weight(ranges: Any, kept: int) -> None:
    name, value = [("w", W), ("v", V)][kept]
    for graph in (
        static_int8(_two_layers(), ranges, {kept}, reduce_range=False),
        dynamic_int8(_two_layers(), {kept}, reduce_range=False),
    ):
        assert _numbers(graph) == {1 - kept}
        constants = _constants(graph)
        assert numpy.array_equal(constants[name], value)
        assert f"{name}_quantized" not in constants


@pytest.mark.parametrize("kept", [0, 1])
def test_a_linear_layer_of_rows_is_kept_too(kept: int) -> None:
    # which is a Gemm, that onnxruntime takes apart and names anew
    nodes = [
        helper.make_node("Gemm", ["input_0", "w", "b"], ["h"], name="layer0@0"),
        helper.make_node("Gemm", ["h", "v", "c"], ["y"], name="layer1@1"),
    ]
    biases = {"b": numpy.zeros(2, dtype=numpy.float32), "c": numpy.zeros(1, dtype=numpy.float32)}
    graph = OnnxGraph(_model(nodes, {"w": W, "v": V, **biases}), [("first",), ("second",)])
    made = dynamic_int8(graph, {kept}, reduce_range=False)
    assert _numbers(made) == {1 - kept}
    name, value = [("w", W), ("v", V)][kept]
    assert _constants(made)[name].tolist() == value.tolist()


def test_a_graph_whose_layers_are_all_kept_answers_in_float(ranges: Any) -> None:
    for graph in (
        static_int8(_two_layers(), ranges, {0, 1}, reduce_range=False),
        dynamic_int8(_two_layers(), {0, 1}, reduce_range=False),
    ):
        assert _numbers(graph) == set()
        assert _answer(graph).tolist() == _floating().tolist() == [[-12.5], [-6.0], [2.75]]


def test_the_float_graph_is_left_as_it_was() -> None:
    graph = _two_layers()
    before = graph.model.SerializeToString()
    static_int8(graph, measured_ranges(graph, INPUTS), (), reduce_range=False)
    dynamic_int8(graph, (), reduce_range=True)
    assert graph.model.SerializeToString() == before
    assert graph.layers == [("first",), ("second",)]


def test_products_of_two_activations_stay_in_float() -> None:
    nodes = [
        helper.make_node("MatMul", ["input_0", "w"], ["h"], name="layer0@0"),
        helper.make_node("Transpose", ["h"], ["t"], name="n1_Transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["h", "t"], ["y"], name="n2_MatMul"),
    ]
    graph = OnnxGraph(_model(nodes, {"w": W}), [("first",)])
    for made in (
        static_int8(graph, measured_ranges(graph, INPUTS), (), reduce_range=False),
        dynamic_int8(graph, (), reduce_range=False),
    ):
        model = onnx.load_from_string(made)
        assert quantized_numbers(model) == {0}
        assert [node.op_type for node in model.graph.node if node.name == "n2_MatMul"] == ["MatMul"]
        assert "y_QuantizeLinear" not in {node.name for node in model.graph.node}


def test_an_embedding_is_int8_only_where_it_is_static() -> None:
    table = numpy.array([[0.0, 1.27], [-0.5, 0.25]], dtype=numpy.float32)
    nodes = [helper.make_node("Gather", ["table", "input_0"], ["y"], name="layer0@0")]
    graph = OnnxGraph(_model(nodes, {"table": table}, TensorProto.INT64, 3), [("embedding",)])
    ids = torch.tensor([[0, 1, 1]])
    static = static_int8(graph, measured_ranges(graph, [[ids]]), (), reduce_range=False)
    assert _numbers(static) == {0}
    numpy.testing.assert_allclose(_answer(static, ids.numpy()), table[ids.numpy()], atol=1.77 / 255)
    dynamic = dynamic_int8(graph, (), reduce_range=False)
    assert _numbers(dynamic) == set()
    assert numpy.array_equal(_answer(dynamic, ids.numpy()), table[ids.numpy()])


def test_a_layer_counts_only_if_all_of_its_products_are_int8() -> None:
    def product(name: str, *inputs: str) -> Any:
        return helper.make_node("MatMul", inputs, [f"{name}_out"], name=name)

    nodes = [
        helper.make_node("DequantizeLinear", ["a", "s"], ["x"], name="x"),
        helper.make_node("DequantizeLinear", ["b", "s"], ["w"], name="w"),
        product("layer0@0", "x", "w"),
        product("layer1@1", "x", "w"),
        product("layer1@2", "x", "float_weight"),
        product("layer5@7", "x", "float_weight"),
        product("layer5@8", "x", "w"),
        product("layer2@3", "float_input", "w"),  # an int8 weight alone saves no time
        helper.make_node("MatMulInteger", ["a", "b"], ["i"], name="layer3@4_quant"),
        helper.make_node("Mul", ["i", "s"], ["j"], name="layer4@5_scales"),
        product("n6_MatMul", "x", "w"),
    ]
    assert quantized_numbers(helper.make_model(helper.make_graph(nodes, "by_hand", [], []))) == {0, 3}
