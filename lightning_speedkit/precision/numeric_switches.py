"""torch's process-wide switches of float32 arithmetic, each with a way back to exactly what was found.

torch has two sets of names for the precision of products: ``set_float32_matmul_precision`` and ``allow_tf32`` of old,
and ``fp32_precision`` per backend and operation since 2.9. It raises where one is read after the other was set. Here
the old names are set, since they keep both in step, unless only the new ones can be read; both are put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

__all__ = ["Switch", "autotune_switch", "convolution_switch", "matmul_switch"]

_BY_LEVEL = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}  # CUDA, oneDNN
_backends: Any = torch.backends  # its modules have attributes that torch does not declare


class Switch:
    """A switch that is set on construction, and knows what was found and what that made of it.

    >>> switch = autotune_switch(True)
    >>> torch.backends.cudnn.benchmark
    True
    >>> switch.restore()
    True
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], tuple[Any, ...]],
        write: Callable[[tuple[Any, ...]], None],
        turn: Callable[[], None],
    ) -> None:
        self.name, self._read, self._write = name, read, write
        self._found = read()
        with _without_advice():
            turn()
        self._set = read()

    def restore(self) -> bool:
        """Put back what was found, unless something else has set the switch since; whether it was put back."""
        if self._read() != self._set:
            return False
        with _without_advice():
            self._write(self._found)
        return True


def matmul_switch(level: str) -> Switch:
    """How matrix products of float32 are computed: ``"highest"``, ``"high"`` or ``"medium"``."""

    def turn() -> None:
        if _by_old_name(torch.get_float32_matmul_precision) is None:
            _backends.cuda.matmul.fp32_precision, _backends.mkldnn.matmul.fp32_precision = _BY_LEVEL[level]
        else:
            torch.set_float32_matmul_precision(level)

    return Switch("matmul", _read_matmul, _write_matmul, turn)


def convolution_switch(tf32: bool) -> Switch:
    """Whether cuDNN computes convolutions and recurrent layers of float32 in TF32."""

    def turn() -> None:
        if _by_old_name(lambda: _backends.cudnn.allow_tf32) is None:
            for operation in _cudnn_operations():
                operation.fp32_precision = "tf32" if tf32 else "ieee"
        else:
            _backends.cudnn.allow_tf32 = tf32

    return Switch("convolutions", _read_cudnn, _write_cudnn, turn)


def autotune_switch(on: bool) -> Switch:
    """Whether cuDNN tries its kernels at each new shape and keeps the fastest."""
    return Switch("autotune", _read_autotune, _write_autotune, lambda: _write_autotune((on,)))


@contextmanager
def _without_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises its new names whenever the old ones are used
        yield


def _by_old_name(read: Callable[[], Any]) -> Any:
    """What a switch is by its old name; ``None`` where torch raises, because it was set by the new one."""
    with _without_advice(), suppress(RuntimeError):
        return read()
    return None


def _read_matmul() -> tuple[Any, ...]:
    old = _by_old_name(torch.get_float32_matmul_precision)
    return old, _backends.cuda.matmul.fp32_precision, _backends.mkldnn.matmul.fp32_precision


def _write_matmul(found: tuple[Any, ...]) -> None:
    old, cuda, mkldnn = found
    if old is not None:
        torch.set_float32_matmul_precision(old)
    _set_operation(_backends.cuda.matmul, cuda)
    _set_operation(_backends.mkldnn.matmul, mkldnn)


def _cudnn_operations() -> tuple[Any, Any]:
    # torch has no public name for cuDNN's recurrent layers, which allow_tf32 switches too
    return _backends.cudnn.conv, _backends._FP32Precision("cuda", "rnn")


def _read_cudnn() -> tuple[Any, ...]:
    old = _by_old_name(lambda: _backends.cudnn.allow_tf32)
    return (old, *(operation.fp32_precision for operation in _cudnn_operations()))


def _write_cudnn(found: tuple[Any, ...]) -> None:
    old, *values = found
    if old is not None:
        _backends.cudnn.allow_tf32 = old
    for operation, value in zip(_cudnn_operations(), values, strict=True):
        _set_operation(operation, value)


def _set_operation(operation: Any, value: str) -> None:
    """Let an operation read as ``value``, by inheriting it from its backend where that gives the same."""
    if operation.fp32_precision != value:
        operation.fp32_precision = "none"
    if operation.fp32_precision != value:
        operation.fp32_precision = value


def _read_autotune() -> tuple[Any, ...]:
    return (_backends.cudnn.benchmark,)


def _write_autotune(found: tuple[Any, ...]) -> None:
    (_backends.cudnn.benchmark,) = found
