"""Exports one part of a network by ``torch.export``, with the batch free, and keeps such programs in files.

A program takes a flat list of tensors; a :class:`CallForm` beside it says how the network itself is called.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_speedkit.compress.call_form import CallForm, form_of, tensors_of
from lightning_speedkit.compress.calls import Call, call_with
from lightning_speedkit.compress.tensor_inputs import TensorInput, check_inputs
from lightning_speedkit.errors import QuantizationError

__all__ = ["ExportedPart", "ProgramModule", "export_part", "quiet_export"]


@dataclass(slots=True)
class ExportedPart:
    """The part ``name`` of a network, how it is called, the program that computes it, and its inputs of every call."""

    name: str
    form: CallForm
    program: torch.export.ExportedProgram
    inputs: list[list[Tensor]]


def export_part(module: nn.Module, name: str, calls: Sequence[Call]) -> ExportedPart:
    """Export ``module``, known as ``name``, for ``calls``, which are calls of it; it is not changed.

    The batch, and every dimension that differs between the calls, is free. QuantizationError says what blocks it.
    """
    with torch.no_grad():
        form = form_of(module, calls[0].args, calls[0].kwargs, call_with(module, calls[0]))
    try:
        others = [form.difference(call.args, call.kwargs) for call in calls]
    except TypeError as error:
        raise QuantizationError(f"it is called in several ways ({error})") from error
    if other := next(filter(None, others), None):
        raise QuantizationError(f"it is called in several ways ({other})")
    inputs = [form.tensors(call.args, call.kwargs) for call in calls]
    example, shapes = _example(inputs)
    flat = _Flat(module, form).eval()
    try:
        # torch prints the graph that it could not finish
        with quiet_export(), redirect_stderr(io.StringIO()), torch.no_grad():
            program = torch.export.export(flat, tuple(example), dynamic_shapes={"tensors": shapes}, strict=False)
    except Exception as error:  # torch.export and the code of the user raise anything
        raise QuantizationError(f"it cannot be exported ({_in_a_line(error)})") from error
    return ExportedPart(name, form, program, inputs)


class _Flat(nn.Module):
    """Calls ``inner`` with a flat list of tensors and answers with one."""

    def __init__(self, inner: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.inner, self._form = inner, form

    @override
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._form.filled(tensors)
        return tuple(tensors_of(self.inner(*args, **kwargs)))


class ProgramModule(nn.Module):
    """Runs a program of ``torch.export`` for the calls that ``form`` describes; another shape is a ValueError."""

    def __init__(self, program: torch.export.ExportedProgram, form: CallForm) -> None:
        super().__init__()
        self.program, self.form = program.module(), form
        self._inputs = _inputs_of(program, form)
        self.training = False  # a program is of one mode, and refuses to be asked for another
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.form.tensors(args, kwargs)
        check_inputs(self.form.name, self._inputs, tensors)
        return self.form.answered(self.program(*tensors))

    @override
    def train(self, mode: bool = True) -> ProgramModule:
        return self


def _inputs_of(program: torch.export.ExportedProgram, form: CallForm) -> list[TensorInput | None]:
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    found = [nodes.get(str(name)) for name in program.graph_signature.user_inputs]
    if len(found) != form.count:
        return [None] * form.count
    return [
        TensorInput(name, tuple(size if isinstance(size, int) else None for size in value.shape), value.dtype)
        if isinstance(value, Tensor)
        else None
        for name, value in zip(form.names, found, strict=True)
    ]


def _example(inputs: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], tuple[dict[int, Any], ...]]:
    """Tensors to export with, and which of their dimensions are free."""
    size = [next((len(t) for t in tensors if t.ndim > 0), 1) for tensors in inputs]
    chosen = max(range(len(inputs)), key=lambda index: size[index])
    example = [tensor.detach().clone() for tensor in inputs[chosen]]
    shapes: list[dict[int, Any]] = []
    for index, tensor in enumerate(example):
        seen = [tensors[index] for tensors in inputs]
        free = {d for d in range(tensor.ndim) if len({t.shape[d] for t in seen if t.ndim == tensor.ndim}) > 1}
        if tensor.ndim and all(len(t) == count for t, count in zip(seen, size, strict=True)):
            free.add(0)
            if size[chosen] == 1:  # a size of one is a constant to torch.export
                example[index] = tensor.repeat_interleave(2, dim=0)
        shapes.append(dict.fromkeys(sorted(free), torch.export.Dim.DYNAMIC))
    return example, tuple(shapes)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keeps the exporters' warnings and logs to themselves, and the fused attention of torch, which they cannot see."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")]
    levels, fast = [logger.level for logger in loggers], torch.backends.mha.get_fastpath_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
