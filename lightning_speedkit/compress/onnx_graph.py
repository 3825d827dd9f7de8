"""The ONNX graph of a part of a network, in which the nodes of each layer carry a name that optimizers keep."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.exported import ExportedPart, quiet_export
from lightning_speedkit.compress.int8 import weighted_layers
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["PRODUCTS", "OnnxGraph", "graph_bytes", "layer_of_node", "onnx_graph", "quiet_onnx"]

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Gather")
_SHAPE_OPS = ("Transpose", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze", "Concat", "Slice", "Split", "Flatten")
_MARK = re.compile(r"^layer(\d+)@")


@dataclass(slots=True)
class OnnxGraph:
    """An ONNX model in float32 (a ``ModelProto``), inferred shapes and all.

    ``layers[i]`` are the names of the layers whose weight the nodes ``layer<i>@...`` multiply with: one, or those that
    share it. They are names inside the whole network.
    """

    model: Any
    layers: list[tuple[str, ...]]


def onnx_graph(part: ExportedPart, module: nn.Module) -> OnnxGraph:
    """The graph of ``part``, which was exported from ``module``; QuantizationError says what blocks it."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("an ONNX graph", extra="quant", library=str(error.name)) from error
    inputs = [f"input_{index}" for index in range(part.form.count)]
    try:
        with quiet_export(), torch.no_grad():
            program: Any = torch.onnx.export(
                part.program, (), dynamo=True, optimize=False, verbose=False, external_data=False, input_names=inputs
            )
        model = program.model_proto
    except Exception as error:  # the exporter raises its own errors and those of torch
        raise QuantizationError(f"it cannot become an ONNX graph ({_in_a_line(error)})") from error
    layers = _Layers(part.name, module)
    layers.mark(model)
    model = _optimized(model)
    layers.mark(model)  # what became one node, such as a convolution and its BatchNorm, has lost its mark
    model = _preprocessed(model)
    return OnnxGraph(model, layers.found_in(model))


def graph_bytes(model: Any) -> bytes:
    """``model`` as the bytes of a file, without what only tools read: traces of the Python code, and shapes between."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for part in (bare.graph, *bare.graph.node, *bare.graph.input, *bare.graph.output, *bare.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    return bytes(bare.SerializeToString())


def layer_of_node(name: str) -> int | None:
    """The number of the layer that a node of that name belongs to.

    >>> layer_of_node("layer3@conv_quant"), layer_of_node("relu")
    (3, None)
    """
    found = _MARK.match(name)
    return int(found.group(1)) if found else None


class _Layers:
    """Finds the nodes that multiply with the weight of a layer, and marks them by the number of the layer."""

    def __init__(self, part: str, module: nn.Module) -> None:
        self.part, self.owners = part, _owners(module)
        self.numbers: dict[tuple[str, ...], int] = {}
        self._weights = dict(module.named_parameters(prefix="inner", remove_duplicate=False))
        self._sources: dict[int, str] = {}

    def found_in(self, model: Any) -> list[tuple[str, ...]]:
        """The layers by their numbers; one whose weight an optimizer took for that of another is listed there."""
        layers = list(self.numbers)
        present = sorted({n for node in model.graph.node if (n := layer_of_node(node.name)) is not None})
        for lost in set(range(len(layers))) - set(present):
            weight = self._weights[self._sources[lost]]
            twins = (n for n in present if torch.equal(self._weights[self._sources[n]], weight))
            if (twin := next(twins, None)) is not None:
                layers[twin] += layers[lost]
        return layers

    def mark(self, model: Any) -> None:
        """Rename the nodes of ``model``; a node that is marked keeps its name."""
        initializers = {value.name for value in model.graph.initializer}
        producers = {output: node for node in model.graph.node for output in node.output}
        for index, node in enumerate(model.graph.node):
            if layer_of_node(node.name) is not None:
                continue
            weights = {"MatMul": node.input, "Gather": node.input[:1]}.get(node.op_type, node.input[1:2])
            found = (s for w in weights for s in _sources(w, producers, initializers) if s in self.owners)
            source = next(found, None)
            if node.op_type not in PRODUCTS or source is None:
                node.name = f"n{index}_{node.op_type}"
                continue
            names = tuple(".".join(filter(None, (self.part, name))) for name in self.owners[source])
            number = self.numbers.setdefault(names, len(self.numbers))
            self._sources.setdefault(number, source)
            node.name = f"layer{number}@{index}"


def _owners(module: nn.Module) -> dict[str, list[str]]:
    """The layers that hold each weight, by the name that the exporter gives it."""
    layers = weighted_layers(module)
    holders: dict[int, list[str]] = {}
    for name, layer in layers.items():
        for weight in layer.parameters(recurse=False):
            if weight.ndim >= 2:
                holders.setdefault(id(weight), []).append(name)
    return {
        f"inner.{name}": holders[id(weight)]
        for name, weight in module.named_parameters(remove_duplicate=False)
        if id(weight) in holders
    }


def _sources(value: str, producers: Mapping[str, Any], initializers: set[str]) -> Iterator[str]:
    """The constants that ``value`` is made from by moving numbers alone."""
    if value in initializers:
        yield value
    elif value in producers and producers[value].op_type in _SHAPE_OPS:
        for name in producers[value].input:
            yield from _sources(name, producers, initializers)


def _optimized(model: Any) -> Any:
    """``model`` with its constants folded; as it is if that fails."""
    import onnxscript.optimizer

    try:
        with quiet_export():
            return onnxscript.optimizer.optimize(model)
    except Exception:  # ONNX Runtime folds most of it too
        return model


def _preprocessed(model: Any) -> Any:
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    failures = []
    with tempfile.TemporaryDirectory() as folder, quiet_onnx(), _no_file_of_a_failure():
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        onnx.save(model, str(before))
        for options in ({}, {"skip_symbolic_shape": True}):
            try:
                quant_pre_process(str(before), str(after), **options)
                return onnx.load(str(after))
            except Exception as error:  # symbolic inference does not know every operator
                failures.append(_in_a_line(error))
    raise QuantizationError(f"ONNX Runtime cannot prepare its graph ({'; '.join(failures)})")


class _OnnxThatSavesNothing:
    def __getattr__(self, name: str) -> Any:
        import onnx

        return _nothing if name == "save_model" else getattr(onnx, name)


def _nothing(model: Any, path: str, save_as_external_data: bool = False) -> None:
    pass


@contextmanager
def _no_file_of_a_failure() -> Iterator[None]:
    """Where symbolic inference stops, onnxruntime writes the graph and its weights to the working directory."""
    try:
        from onnxruntime.tools import symbolic_shape_infer as tool
    except ImportError:  # it needs sympy, and is left out without it
        yield
        return
    original = tool.onnx
    tool.onnx = _OnnxThatSavesNothing()
    try:
        yield
    finally:
        tool.onnx = original


@contextmanager
def quiet_onnx() -> Iterator[None]:
    """Keeps what onnxruntime's tools say, which write to the root logger, to themselves."""

    def refuse(record: logging.LogRecord) -> bool:
        return "onnx" not in record.pathname and "quant" not in record.pathname

    root = logging.getLogger()
    root.addFilter(refuse)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeFilter(refuse)


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
