"""ONNX graphs of parts of networks: they compute the same, and the nodes of each layer can be told by their names."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.exported import ExportedPart, export_part
from lightning_speedkit.compress.onnx_graph import OnnxGraph, graph_bytes, layer_of_node, onnx_graph, quiet_onnx
from lightning_speedkit.errors import MissingExtraError, QuantizationError


def _exported(net: nn.Module, x: Tensor, name: str = "part") -> ExportedPart:
    return export_part(net.eval(), name, [Call(name, (x,), {})])


def _graph(net: nn.Module, x: Tensor, name: str = "part") -> OnnxGraph:
    return onnx_graph(_exported(net, x, name), net)


def _answer(model: Any, x: Tensor) -> Tensor:
    """What onnx's own evaluator, in numpy, says."""
    return torch.from_numpy(ReferenceEvaluator(model).run(None, {"input_0": x.numpy()})[0])


def _marked(graph: OnnxGraph) -> list[tuple[str, int]]:
    nodes = graph.model.graph.node
    return [(node.op_type, n) for node in nodes if (n := layer_of_node(node.name)) is not None]


class _Conv(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        for _ in range(3):
            self(torch.randn(8, 1, 4, 4) * 2 + 1)  # running statistics that are not zero and one


def test_a_conv_net_computes_the_same_with_its_norm_inside_the_convolution() -> None:
    net: Any = _Conv()
    x = torch.randn(4, 1, 4, 4)
    graph = _graph(net, x)
    assert [node.op_type for node in graph.model.graph.node] == ["Conv", "Relu", "Reshape", "Gemm"]
    assert _marked(graph) == [("Conv", 0), ("Gemm", 1)]
    assert graph.layers == [("part.0",), ("part.4",)]
    for batch in (x, torch.randn(7, 1, 4, 4)):
        with torch.no_grad():
            torch.testing.assert_close(_answer(graph.model, batch), net(batch), rtol=1e-5, atol=1e-5)
    kept = {value.name: numpy_helper.to_array(value) for value in graph.model.graph.initializer}
    (conv,) = [node for node in graph.model.graph.node if node.op_type == "Conv"]
    factor = net[1].weight / torch.sqrt(net[1].running_var + net[1].eps)
    expected: Tensor = (net[0].weight * factor[:, None, None, None]).detach()
    torch.testing.assert_close(torch.from_numpy(kept[conv.input[1]].copy()), expected, rtol=1e-5, atol=1e-6)


class _Shared(nn.Module):
    """Two layers that share a weight, and two of equal numbers on one input, which an optimizer computes once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))
        self.b.weight = self.a.weight
        self.d.load_state_dict(self.c.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x).relu())
        return self.c(hidden) + self.d(hidden)


@pytest.fixture(scope="module")
def shared() -> OnnxGraph:
    return _graph(_Shared(), torch.randn(4, 3), "deep.part")


def test_layers_that_share_a_weight_or_were_merged_are_one_and_have_their_whole_names(shared: OnnxGraph) -> None:
    present = {number: shared.layers[number] for _, number in _marked(shared)}
    assert sorted(present.values()) == [("deep.part.a", "deep.part.b"), ("deep.part.c", "deep.part.d")]
    assert [op for op, _ in _marked(shared)] == ["Gemm"] * 3  # a, b, and c for d too
    x, net = torch.randn(5, 3), _Shared()
    with torch.no_grad():
        expected = net.c(net.b(net.a(x).relu())) * 2
        torch.testing.assert_close(_answer(shared.model, x), expected, rtol=1e-5, atol=1e-5)


class _Sequence(nn.Module):
    """An embedding, a product over a sequence, one of two activations, and one with a number that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(3, 3))

    def forward(self, ids: Tensor) -> Tensor:
        words = self.embedding(ids)
        hidden = self.layer(words.relu())
        return (hidden @ hidden.transpose(1, 2)) @ (words @ self.table)


def test_products_are_marked_only_if_they_have_the_weight_of_a_layer() -> None:
    net, ids = _Sequence(), torch.tensor([[0, 4, 2, 2], [1, 1, 3, 0]])
    graph = _graph(net, ids, "")
    assert _marked(graph) == [("Gather", 0), ("MatMul", 1)]
    assert graph.layers == [("embedding",), ("layer",)]
    assert [node.op_type for node in graph.model.graph.node].count("MatMul") == 4
    with torch.no_grad():
        torch.testing.assert_close(_answer(graph.model, ids), net(ids), rtol=1e-5, atol=1e-5)


def test_an_operator_that_onnx_lacks_is_refused_in_one_line() -> None:
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.layer(x))

    with pytest.raises(QuantizationError, match=r"^it cannot become an ONNX graph \(\w+: .+\)$") as caught:
        _graph(Bessel(), torch.randn(4, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("library", ["onnx", "onnxscript"])
def test_a_missing_library_is_told_with_the_line_that_installs_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _exported(nn.Linear(3, 2), torch.randn(4, 3))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library}.*lightning-speedkit\[quant\]"):
        onnx_graph(part, nn.Linear(3, 2))


def test_bytes_hold_the_numbers_but_no_trace_of_the_code(shared: OnnxGraph) -> None:
    model, x = onnx.ModelProto.FromString(shared.model.SerializeToString()), torch.randn(4, 3)
    for part in (model.graph, model.graph.node[0], model.graph.input[0]):
        part.doc_string = "/home/someone/net.py"
        part.metadata_props.add(key="file", value="/home/someone/net.py")
    before = model.SerializeToString()
    data = graph_bytes(model)
    assert b"/net.py" in before
    assert b"/net.py" not in data
    assert b"test_onnx_graph" not in data
    assert model.SerializeToString() == before
    bare = onnx.load_from_string(data)
    assert list(bare.graph.value_info) == []
    assert [value.name for value in bare.graph.input] == ["input_0"]
    assert torch.equal(_answer(bare, x), _answer(model, x))


@pytest.mark.parametrize(
    ("name", "number"),
    [("layer0@3", 0), ("layer12@3_quant", 12), ("layer@3", None), ("a_layer1@2", None), ("n4_Relu", None), ("", None)],
)
def test_the_number_of_a_layer_is_read_from_the_name_of_a_node(name: str, number: int | None) -> None:
    assert layer_of_node(name) == number


def test_onnxruntime_s_tools_are_quiet_and_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    filters = list(root.filters)

    def say(path: str) -> None:
        root.handle(root.makeRecord("root", logging.WARNING, path, 1, path, (), None))

    with warnings.catch_warnings(record=True) as shown, suppress(KeyError), quiet_onnx():
        say("/lib/onnxruntime/quantization/calibrate.py")
        say("/lib/lightning/trainer.py")
        warnings.warn("inside", stacklevel=1)
        raise KeyError
    say("/lib/onnxruntime/quantization/after.py")
    assert caplog.messages == ["/lib/lightning/trainer.py", "/lib/onnxruntime/quantization/after.py"]
    assert shown == []
    assert root.filters == filters
