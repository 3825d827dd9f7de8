"""A module that runs a graph of ONNX in ONNX Runtime on the CPU and is called like the network it was made from."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from lightning_speedkit.compress.call_form import CallForm
from lightning_speedkit.compress.float_copy import replace_module
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["OnnxModule", "install", "missing_onnx", "new_session"]


def missing_onnx(libraries: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")) -> str | None:
    """The line that installs what ONNX Runtime needs, or ``None`` if all of it is there."""
    from importlib.util import find_spec

    absent = ", ".join(name for name in libraries if find_spec(name) is None)
    return str(MissingExtraError("ONNX Runtime", extra="quant", library=absent)) if absent else None


def new_session(graph: bytes, *, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU, by default with as many threads as torch has now; it logs only errors."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("an ONNX model", extra="quant", library="onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for each of its own codes
        raise QuantizationError(f"ONNX Runtime cannot load the graph ({type(error).__name__}: {error})") from error


class OnnxModule(nn.Module):
    """Runs ``graph``, the bytes of an ONNX model, for the calls that ``form`` describes.

    It has no parameters: the weights are in the graph. Inputs are taken to the CPU and to the dtype that the graph
    asks for; outputs are new tensors without a gradient. A copy makes a session of its own.
    """

    def __init__(self, graph: bytes, form: CallForm) -> None:
        super().__init__()
        self.graph, self.form = graph, form
        self._session: Any = None
        self._dtypes: list[torch.dtype] = []
        self._names: list[str] = []
        self._open()
        self.eval()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.form.tensors(args, kwargs)
        feed = {
            name: tensor.detach().to("cpu", dtype).contiguous().numpy()
            for name, dtype, tensor in zip(self._names, self._dtypes, tensors, strict=True)
            if name
        }
        return self.form.answered(torch.as_tensor(array) for array in self._session.run(None, feed))

    @override
    def extra_repr(self) -> str:
        return f"{self.form.name}, {len(self.graph)} bytes"

    def _open(self) -> None:
        self._session = new_session(self.graph)
        inputs = {value.name: value.type for value in self._session.get_inputs()}
        # an input that the network does not use is not an input of the graph
        names = [f"input_{index}" for index in range(self.form.count)]
        self._names = [name if name in inputs else "" for name in names]
        self._dtypes = [_DTYPES[inputs[name]] if name in inputs else torch.float32 for name in names]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", super()).__setstate__(state)
        self._open()


_DTYPES = {
    "tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64, "tensor(int32)": torch.int32, "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8, "tensor(uint8)": torch.uint8, "tensor(bool)": torch.bool,
}  # fmt: skip


def install(root: nn.Module, name: str, runner: nn.Module) -> nn.Module:
    """``root`` in which ``runner`` answers for the module ``name``; the root itself stays an instance of its class.

    So the methods of a LightningModule go on to work, and what they call is answered by ``runner``.
    """
    if name:
        return replace_module(root, name, runner)
    cls = type(root)
    original = cls.forward

    class Quantized(cls):  # type: ignore[misc, valid-type]
        @override
        @functools.wraps(original)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.quantized_runner(*args, **kwargs)

    Quantized.__name__ = Quantized.__qualname__ = f"Quantized{cls.__name__}"
    Quantized.__module__, Quantized.__doc__ = cls.__module__, cls.__doc__
    root.__class__ = Quantized
    root.quantized_runner = runner
    return root
