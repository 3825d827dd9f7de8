"""What a graph takes for each of its inputs, and what is said of a tensor that it does not take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TensorInput", "check_inputs"]


@dataclass(frozen=True, slots=True)
class TensorInput:
    """The argument ``name``, its sizes (``None`` where any will do) and its dtype.

    ``converts`` says that a tensor of another dtype is converted where nothing of it is lost but digits.

    >>> TensorInput("x", (None, 64), torch.float32).describe()
    'x of shape (any, 64) and dtype float32'
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    converts: bool = False

    def takes(self, tensor: Tensor) -> bool:
        """Whether the graph can be asked with ``tensor``."""
        return self._has_shape(tensor) and self._has_dtype(tensor)

    def describe(self) -> str:
        """Its name, shape and dtype in words."""
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        shape = f"({sizes}{',' if len(self.shape) == 1 else ''})"
        return f"{self.name} of shape {shape} and dtype {_word(self.dtype)}"

    def remedy(self, tensor: Tensor) -> str:
        """What to do with a tensor that is not taken."""
        if not self._has_shape(tensor):
            if self._has_shape(tensor.unsqueeze(0)):
                return f"It has no batch dimension: give {self.name}.unsqueeze(0)."
            return (
                "Only the batch may differ, and what differed among the calibration batches; to allow more, quantize "
                "with batches of several sizes."
            )
        return f"Convert it: {self.name}.to(torch.{_word(self.dtype)})."

    def _has_shape(self, tensor: Tensor) -> bool:
        return len(self.shape) == tensor.ndim and all(
            size in (None, found) for size, found in zip(self.shape, tensor.shape, strict=True)
        )

    def _has_dtype(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.dtype or (self.converts and torch.can_cast(tensor.dtype, self.dtype))


def check_inputs(network: str, wanted: Sequence[TensorInput | None], tensors: Sequence[Tensor]) -> None:
    """ValueError if a graph of ``network`` does not take one of ``tensors``; ``None`` stands for one that it ignores.

    >>> check_inputs("Net", [TensorInput("x", (None, 64), torch.float32)], [torch.ones(4, 32)])
    Traceback (most recent call last):
    ValueError: The quantized forward of Net takes x of shape (any, 64) and dtype float32, and got shape (4, 32) and \
dtype float32. Only the batch may differ, and what differed among the calibration batches; to allow more, quantize \
with batches of several sizes.
    """
    for one, tensor in zip(wanted, tensors, strict=True):
        if one is not None and not one.takes(tensor):
            raise ValueError(
                f"The quantized forward of {network} takes {one.describe()}, and got shape {tuple(tensor.shape)} and "
                f"dtype {_word(tensor.dtype)}. {one.remedy(tensor)}"
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
