"""One batch on its way to a CUDA device: the copy, and what may be used and freed when.

What it does: the copy runs on a stream of its own, from page-locked memory, so that it overlaps with what the device
computes. The stream that computes waits for it, the host does not. Two things must outlive the call: the host's memory
until the copy has read it, and the device's memory until the last kernel that uses it has run.

Not yet run on a GPU.

Source: PyTorch's notes on CUDA semantics (streams, ``record_stream``, pinned memory).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

__all__ = ["CopyUnderWay", "CudaCopies", "change_tensors"]


class CopyUnderWay(Protocol):
    """A copy that was begun. Whoever began it keeps it until :meth:`is_done`, and with it the batch on the host."""

    def hand_out(self) -> Any:
        """The batch on the device, for use on the current stream, which waits for the copy; called once."""

    def is_done(self) -> bool:
        """Whether the copy has read the host's memory to the end. Does not wait."""

    def wait(self) -> None:
        """Return when the copy has read the host's memory to the end."""


class CudaCopies:
    """Begins copies to one CUDA device, on one stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> CopyUnderWay:
        """Start the copy of every tensor of a batch that is on the CPU."""
        return _CudaCopy(batch, self.device, self._stream)


class _CudaCopy:
    def __init__(self, batch: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._host = change_tensors(batch, _pinned)
        self._copies: list[Tensor] = []
        with torch.cuda.stream(stream):
            self._batch = change_tensors(self._host, self._copied)
            self._read = stream.record_event()

    def _copied(self, tensor: Tensor) -> Tensor:
        if not _is_plain_on_the_host(tensor):
            return tensor
        on_device = tensor.to(self._device, non_blocking=True)
        self._copies.append(on_device)
        return on_device

    def hand_out(self) -> Any:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._read)
        for on_device in self._copies:
            on_device.record_stream(current)  # its memory is the side stream's, which must not take it back too early
        batch, self._batch = self._batch, None
        self._copies.clear()
        return move_data_to_device(batch, self._device)  # what is no plain tensor goes now, on the current stream

    def is_done(self) -> bool:
        return bool(self._read.query())

    def wait(self) -> None:
        self._read.synchronize()


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if _is_plain_on_the_host(tensor) and not tensor.is_pinned() else tensor


def _is_plain_on_the_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def change_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each tensor replaced; the batch that was given, and what is no tensor, stay as they are.

    Looks through dicts, tuples, named tuples, lists and dataclasses. An object that moves itself to a device, such as a
    ``PackedSequence``, and a mapping of another kind are left alone.

    >>> change_tensors({"x": (torch.tensor(1), "a"), "y": [torch.tensor(2)]}, lambda tensor: tensor + 1)
    {'x': (tensor(2), 'a'), 'y': [tensor(3)]}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if callable(getattr(batch, "to", None)):
        return batch
    if isinstance(batch, dict):
        new = copy.copy(batch)
        new.update({key: change_tensors(value, change) for key, value in batch.items()})
        return new
    if type(batch) in (list, tuple):
        return type(batch)(change_tensors(value, change) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change_tensors(value, change) for value in batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):  # also of a frozen one, and of fields that __init__ does not take
            object.__setattr__(twin, field.name, change_tensors(getattr(batch, field.name), change))
        return twin
    return batch
