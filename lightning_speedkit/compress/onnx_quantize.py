"""Quantizes an ONNX graph by ONNX Runtime's own tools: statically from measured ranges, or dynamically."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_speedkit.compress.onnx_graph import OnnxGraph, graph_bytes, layer_of_node, quiet_onnx

__all__ = ["DYNAMIC_OPS", "STATIC_OPS", "dynamic_int8", "measured_ranges", "quantized_numbers", "static_int8"]

STATIC_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather")
DYNAMIC_OPS = ("Gemm", "MatMul", "LSTM")
# what stands between the products, and would turn int8 into float and back if it were left in float
_BETWEEN = ("Relu", "Clip", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Flatten",
            "Transpose", "Squeeze", "Unsqueeze", "Pad", "Resize")  # fmt: skip
_OPTIONS = {"MatMulConstBOnly": True}


def _operators(graph: OnnxGraph) -> list[str]:
    """The operators to quantize. A sum is one between convolutions; in a transformer it costs accuracy for nothing."""
    convolutional = any(node.op_type == "Conv" for node in graph.model.graph.node)
    return [*STATIC_OPS, *_BETWEEN, *(["Add"] if convolutional else [])]


class _Reader:
    """The recorded inputs, as onnxruntime reads them: a dict of arrays at a time, and then ``None``."""

    def __init__(self, inputs: Sequence[Sequence[Tensor]], names: Collection[str]) -> None:
        self._feeds = iter(
            [
                {f"input_{index}": t.contiguous().numpy() for index, t in enumerate(ts) if f"input_{index}" in names}
                for ts in inputs
            ]
        )

    def get_next(self) -> Any:
        return next(self._feeds, None)


def measured_ranges(graph: OnnxGraph, inputs: Sequence[Sequence[Tensor]]) -> Any:
    """The smallest and the largest value of each tensor of ``graph`` over ``inputs``."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    names = {value.name for value in graph.model.graph.input}
    with tempfile.TemporaryDirectory() as folder, quiet_onnx():
        path = Path(folder, "float.onnx")
        onnx.save(graph.model, str(path))
        calibrator = create_calibrator(
            path,
            _operators(graph),
            augmented_model_path=str(Path(folder, "watched.onnx")),
            calibrate_method=CalibrationMethod.MinMax,
        )
        reader: Any = _Reader(inputs, names)
        calibrator.collect_data(reader)
        return calibrator.compute_data()


def static_int8(graph: OnnxGraph, ranges: Any, kept_float: Collection[int], *, reduce_range: bool) -> bytes:
    """``graph`` with int8 products and what stands between them, as bytes; the layers ``kept_float`` stay in float."""
    from onnxruntime.quantization import QDQQuantizer, QuantType

    with quiet_onnx():
        quantizer = QDQQuantizer(
            copy.deepcopy(graph.model),
            True,
            reduce_range,
            QuantType.QInt8,
            QuantType.QUInt8,
            ranges,
            [],
            _excluded(graph, kept_float, STATIC_OPS),
            _operators(graph),
            dict(_OPTIONS),
        )
        quantizer.quantize_model()
        return graph_bytes(quantizer.model.model)


def dynamic_int8(graph: OnnxGraph, kept_float: Collection[int], *, reduce_range: bool) -> bytes:
    """``graph`` with int8 weights whose products measure the range of their input at each call, as bytes."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    excluded = _excluded(graph, kept_float, DYNAMIC_OPS)
    excluded += [f"{name}_MatMul" for name in excluded]  # what it makes of a Gemm before it looks who is excluded
    with tempfile.TemporaryDirectory() as folder, quiet_onnx():
        path, result = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        onnx.save(graph.model, str(path))
        quantize_dynamic(
            str(path),
            str(result),
            op_types_to_quantize=["MatMul", "LSTM"],
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded,
            extra_options=dict(_OPTIONS),
        )
        return graph_bytes(onnx.load(str(result)))


def quantized_numbers(model: Any) -> set[int]:
    """The numbers of the layers whose products are int8 in ``model``, in all of their nodes."""
    dequantized = {output for node in model.graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    found: dict[int, bool] = {}
    for node in model.graph.node:
        number = layer_of_node(node.name)
        if number is None:
            continue
        if node.op_type in ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"):
            found[number] = found.get(number, True)
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"):
            is_int8 = len(node.input) > 1 and node.input[1] in dequantized and node.input[0] in dequantized
            found[number] = found.get(number, True) and is_int8
        elif node.op_type == "Gather":
            found[number] = found.get(number, True) and node.input[0] in dequantized
    return {number for number, is_int8 in found.items() if is_int8}


def _excluded(graph: OnnxGraph, kept_float: Collection[int], allowed: Collection[str]) -> list[str]:
    """Nodes to leave in float: those of the layers ``kept_float``, and products without a weight of a layer."""
    names = []
    for node in graph.model.graph.node:
        number = layer_of_node(node.name)
        is_product = node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "LSTM")
        if number in kept_float or (is_product and (number is None or node.op_type not in allowed)):
            names.append(node.name)
    return names
