"""A module that runs an ONNX graph, here one written by hand: y = x @ W + b."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from lightning_speedkit.compress.call_form import CallForm, form_of
from lightning_speedkit.compress.onnx_module import OnnxModule, install, missing_onnx, new_session
from lightning_speedkit.errors import MissingExtraError, QuantizationError


def _graph(used: str = "input_0") -> bytes:
    """``used`` @ [[1, 2], [3, 4]] + [10, 20]."""
    weight = numpy_helper.from_array(numpy.array([[1, 2], [3, 4]], dtype=numpy.float32), "w")
    bias = numpy_helper.from_array(numpy.array([10, 20], dtype=numpy.float32), "b")
    graph = helper.make_graph(
        [helper.make_node("MatMul", [used, "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["y"])],
        "by_hand",
        [helper.make_tensor_value_info(used, TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [weight, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


class _Net(nn.Module):
    """What the graph stands for; ``unused`` may be missing in the graph."""

    def forward(self, unused: Tensor, x: Tensor, *, flag: bool = False) -> dict[str, Any]:
        return {"y": x, "flag": None}


def _form(net: nn.Module | None = None) -> CallForm:
    net = net or nn.Identity()
    return form_of(net, (torch.ones(1, 2),), {}, torch.ones(1, 2))


X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
Y = [[11.0, 22.0], [13.0, 24.0], [8.0, 18.0]]  # worked out by hand


@pytest.mark.parametrize("x", [X, X.double(), X.to(torch.int64), X.T.contiguous().T, X.clone().requires_grad_()])
def test_it_answers_in_the_dtype_of_the_graph_and_without_a_gradient(x: Tensor) -> None:
    answer = OnnxModule(_graph(), _form())(x)
    assert answer.tolist() == Y
    assert answer.dtype == torch.float32
    assert not answer.requires_grad


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (
            torch.ones(4, 3),
            r"_Named takes x of shape \(any, 2\) and dtype float32, and got shape \(4, 3\) and",
        ),
        (torch.ones(2), r"got shape \(2,\) .* It has no batch dimension: give x\.unsqueeze\(0\)\."),
        (X.cfloat(), r"got shape \(3, 2\) and dtype complex64\. Convert it: x\.to\(torch\.float32\)\."),
    ],
)
def test_an_input_that_the_graph_does_not_take_is_told_in_the_words_of_the_caller(x: Tensor, told: str) -> None:
    class _Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = OnnxModule(_graph(), _form(_Named()))
    for again in (module, copy.deepcopy(module)):
        with pytest.raises(ValueError, match=told):
            again(x)


def test_sizes_that_do_not_belong_together_are_told_with_all_shapes() -> None:
    infos = [helper.make_tensor_value_info(f"input_{i}", TensorProto.FLOAT, [f"n{i}", 2]) for i in range(2)]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph([helper.make_node("Add", ["input_0", "input_1"], ["y"])], "sum", infos, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    form = form_of(_Net(), (X, X), {}, X)
    module = OnnxModule(bytes(model.SerializeToString()), form)
    assert module(X, X).tolist() == (X + X).tolist()
    with pytest.raises(QuantizationError, match=r"of _Net .*It got the shapes unused \(3, 2\); x \(2, 2\); sizes that"):
        module(X, X[:2])


def test_each_answer_is_a_tensor_of_its_own() -> None:
    module = OnnxModule(_graph(), _form())
    first = module(X)
    first.zero_()
    assert module(X).tolist() == Y
    assert first.tolist() == [[0.0, 0.0]] * 3


def test_inputs_that_the_graph_does_not_use_are_left_out_and_the_answer_has_its_structure() -> None:
    form = form_of(_Net(), (torch.ones(1), X), {}, {"y": X, "flag": None})
    module = OnnxModule(_graph("input_1"), form)
    answer = module(torch.full((1,), numpy.nan), x=X)
    assert list(answer) == ["y", "flag"]
    assert answer["y"].tolist() == Y
    assert answer["flag"] is None
    with pytest.raises(ValueError, match=r"_Net can only be called as .*: flag is True, and was False\."):
        module(torch.ones(1), X, flag=True)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_answers_by_a_session_of_its_own(again: Any) -> None:
    module = OnnxModule(_graph(), _form())
    twin = again(module)
    assert twin._session is not module._session
    assert twin(X).tolist() == Y
    assert twin.form == module.form
    assert not twin.training


def test_it_has_no_parameters_and_says_what_it_runs() -> None:
    module = OnnxModule(_graph(), _form())
    assert module.state_dict() == {}
    assert not module.training
    assert repr(module) == f"OnnxModule(Identity, {len(_graph())} bytes)"


@pytest.mark.parametrize(("threads", "expected"), [(None, torch.get_num_threads()), (3, 3)])
def test_a_session_has_the_threads_that_are_asked_for(threads: int | None, expected: int) -> None:
    session = new_session(_graph(), threads=threads)
    assert session.get_session_options().intra_op_num_threads == expected
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_bytes_that_are_no_graph_are_an_error() -> None:
    with pytest.raises(QuantizationError, match=r"ONNX Runtime cannot load the graph \(\w+: "):
        new_session(b"not a graph")


def test_missing_libraries_are_told_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_onnx() is None
    line = missing_onnx(("json", "no_such_library_a", "no_such_library_b"))
    assert line is not None
    assert "no_such_library_a, no_such_library_b" in line
    assert "lightning-speedkit[quant]" in line
    assert "json" not in line
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime.*lightning-speedkit\[quant\]"):
        new_session(_graph())


class _Root(nn.Module):
    """A network with a method that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The answer."""
        return self.inner(x)

    def total(self, x: Tensor) -> float:
        return float(self(x).sum())


def test_a_part_is_replaced_inside_the_network() -> None:
    root, runner = _Root(), OnnxModule(_graph(), _form())
    result = install(root, "inner", runner)
    assert type(result) is _Root
    assert result.inner is runner
    assert result(X).tolist() == Y
    assert result.total(X) == 96.0  # 33 + 37 + 26


def test_the_whole_network_stays_of_its_class_and_others_of_it_are_untouched() -> None:
    root, other = _Root(), _Root()
    result = install(root, "", OnnxModule(_graph(), _form()))
    assert isinstance(result, _Root)
    assert type(result).__name__ == "Quantized_Root"
    assert result.total(X) == 96.0
    assert result.forward.__doc__ == "The answer."
    torch.testing.assert_close(other(X), other.inner(X), rtol=0, atol=0)
    assert copy.deepcopy(result).total(X) == 96.0
