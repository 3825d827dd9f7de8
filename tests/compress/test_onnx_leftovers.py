"""What onnxruntime writes to the working directory when its symbolic inference stops does not reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.tools import symbolic_shape_infer as tool

from lightning_speedkit.compress.onnx_graph import _preprocessed


def test_a_stopped_inference_leaves_no_file_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Any] = []

    def stops(self: Any, start: Any = None) -> bool:
        stopped.append(self)
        self.run_ = False
        return False

    monkeypatch.setattr(tool.SymbolicShapeInference, "_infer_impl", stops)
    monkeypatch.chdir(tmp_path)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert [node.op_type for node in _preprocessed(model).graph.node] == ["Relu"]
    assert len(stopped) == 1
    assert list(tmp_path.iterdir()) == []
    assert tool.onnx is onnx
