"""A module that runs a graph of ONNX in ONNX Runtime on the CPU and is called like the network it was made from."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from lightning_speedkit.compress.call_form import CallForm
from lightning_speedkit.compress.float_copy import replace_module
from lightning_speedkit.compress.tensor_inputs import TensorInput, check_inputs
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
    asks for; outputs are new tensors without a gradient. A copy makes a session of its own. A tensor that the graph
    does not take, by its shape or because its dtype is of another kind, is a ValueError.
    """

    def __init__(self, graph: bytes, form: CallForm) -> None:
        super().__init__()
        self.graph, self.form = graph, form
        self._session: Any = None
        self._inputs: list[TensorInput | None] = []
        self._open()
        self.eval()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.form.tensors(args, kwargs)
        check_inputs(self.form.name, self._inputs, tensors)
        feed = {
            f"input_{index}": tensor.detach().to("cpu", wanted.dtype).contiguous().numpy()
            for index, (wanted, tensor) in enumerate(zip(self._inputs, tensors, strict=True))
            if wanted is not None
        }
        try:
            arrays = self._session.run(None, feed)
        except Exception as error:  # onnxruntime has an exception class for each of its own codes
            got = "; ".join(f"{name} {tuple(t.shape)}" for name, t in zip(self.form.names, tensors, strict=True))
            said = " ".join(str(error).split())
            raise QuantizationError(
                f"ONNX Runtime cannot run the quantized forward of {self.form.name} ({type(error).__name__}: {said}). "
                f"It got the shapes {got}; sizes that belong together, such as those of one batch, have to be equal."
            ) from error
        return self.form.answered(map(torch.as_tensor, arrays))

    @override
    def extra_repr(self) -> str:
        return f"{self.form.name}, {len(self.graph)} bytes"

    def _open(self) -> None:
        self._session = new_session(self.graph)
        # an input that the network does not use is not an input of the graph
        found = {value.name: value for value in self._session.get_inputs()}
        own = [found.get(f"input_{index}") for index in range(self.form.count)]
        self._inputs = [
            None if value is None else TensorInput(name, _sizes(value.shape), _DTYPES[value.type], converts=True)
            for name, value in zip(self.form.names, own, strict=True)
        ]

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


def _sizes(shape: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)


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
