"""The workspace that the LSTM of oneDNN keeps for its backward pass on a CPU, of which fake tensors do not know.

``aten::mkldnn_rnn_layer`` returns it beside its outputs, for a fake input with no byte in it, though it is most of what
such a layer keeps (of an LSTM of width 256 on 64 steps of 32 samples: 33 of 35 MB). Its size grows with the steps in a
line, so it is read off two real calls, of one and of nine steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

__all__ = ["RecurrentWorkspaces"]

_OPERATION: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)  # not in a build without oneDNN


class RecurrentWorkspaces(TorchDispatchMode):
    """Within it, a fake recurrent layer on a CPU keeps as many bytes as a real one; real ones are left alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _OPERATION is None or func is not _OPERATION.default or not isinstance(args[0], FakeTensor):
            return result
        steps, *rest = args[0].shape
        if args[0].device.type != "cpu" or steps == 0:
            return result
        tensors = tuple((tuple(one.shape), one.dtype) for one in args[1:7])
        least, per_step = _bytes(tuple(rest), args[0].dtype, tensors, _hashable(args[7:]))
        return (*result[:3], torch.empty(round(least + (steps - 1) * per_step), dtype=torch.uint8))


@functools.lru_cache(maxsize=64)
def _bytes(
    sample: tuple[int, ...],
    dtype: torch.dtype,
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    settings: tuple[Any, ...],
) -> tuple[int, float]:
    """The bytes of the workspace of one step, and those that each further step adds."""
    with _disable_current_modes(), torch.enable_grad():  # without, the layer keeps nothing
        rest = [torch.zeros(shape, dtype=kind, requires_grad=True) for shape, kind in tensors]
        plain = [list(value) if isinstance(value, tuple) else value for value in settings]

        def workspace(steps: int) -> int:
            made: tuple[Tensor, ...] = _OPERATION.default(torch.zeros(steps, *sample, dtype=dtype), *rest, *plain)
            return made[3].numel() * made[3].element_size()

        one, nine = workspace(1), workspace(9)
    return one, (nine - one) / 8


def _hashable(settings: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in settings)
