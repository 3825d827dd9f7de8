"""Saved tensors wait in host memory: they are copied out in the forward and come back in the backward.

What it does: of what autograd saves inside a context, tensors on the device from a size on are copied to host memory,
on CUDA to pinned memory and on a stream of their own, while the forward goes on. What shares a storage is copied once.
The values, the strides and so the gradients are those of the run without it. Parameters and buffers stay.
When it helps: the device's memory is full, and the link to the host is fast or the step long enough to hide the copies.
What it costs: host memory, and the time of the copies; those of the backward are not hidden. On a CPU nothing is
copied: the tensors are there already.

Source: ``torch.autograd.graph.save_on_cpu``, which copies what is shared several times and waits for each copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["offload_saved_tensors"]

_weak: Callable[..., Any] = StorageWeakRef
_new_stream: Callable[..., Any] = torch.cuda.Stream


def offload_saved_tensors(module: nn.Module, min_bytes: int = 1 << 20) -> AbstractContextManager[Any]:
    """A context in which saved tensors of at least ``min_bytes`` go to host memory, but for the module's own.

    >>> layer = nn.Linear(2, 2)
    >>> with offload_saved_tensors(layer):
    ...     loss = layer(torch.ones(3, 2)).square().sum()
    >>> loss.backward()
    """
    copies = _HostCopies(min_bytes, (*module.parameters(), *module.buffers()))
    context: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(copies.pack, _unpack)
    return context


class _HostCopies:
    """Of one forward: what was copied already. It ends with the forward; each copy ends with the node that needs it."""

    def __init__(self, min_bytes: int, stay: Iterable[Tensor]) -> None:
        self._min_bytes = min_bytes
        self._stay = {_storage(tensor) for tensor in stay if _has_storage(tensor)}
        self._whole: dict[int, tuple[Any, int, _Copy]] = {}

    def pack(self, tensor: Tensor) -> _Here | _There:
        if not self._is_to_go(tensor):
            return _Here(tensor)
        storage = tensor.untyped_storage()
        whole = storage.nbytes() // tensor.element_size()
        if 2 * _extent(tensor) < whole:  # a small part of a large storage
            span = tensor.as_strided((_extent(tensor),), (1,), tensor.storage_offset())
            return _There(tensor, _Copy(span), 0)
        weak, version, copy = self._whole.get(_storage(tensor), (None, 0, None))
        if copy is None or weak is None or weak.expired() or version != tensor._version or copy.dtype != tensor.dtype:
            copy = _Copy(tensor.as_strided((whole,), (1,), 0))
            self._whole[_storage(tensor)] = _weak(storage), tensor._version, copy
        return _There(tensor, copy, int(tensor.storage_offset()))

    def _is_to_go(self, tensor: Tensor) -> bool:
        return (
            _has_storage(tensor)
            and not _is_on_host(tensor)
            and not tensor.is_inference()
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.numel() > 0
            and tensor.numel() * tensor.element_size() >= self._min_bytes
            and _storage(tensor) not in self._stay
        )


class _Here:
    """A tensor that stays. Autograd does not see whether it is overwritten once there are hooks, so this looks."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)

    def unpack(self) -> Tensor:
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)}, saved in a module with policy='offload', is at version "
                f"{_version(self._tensor)}; expected version {self._version} instead."
            )
        return self._tensor


class _There:
    """A tensor that is a view of a copy in host memory."""

    def __init__(self, tensor: Tensor, copy: _Copy, offset: int) -> None:
        self._copy = copy
        self._view = tensor.size(), tensor.stride(), offset

    def unpack(self) -> Tensor:
        return self._copy.bring().as_strided(*self._view)


class _Copy:
    """A flat tensor in host memory, and where it came from."""

    def __init__(self, flat: Tensor) -> None:
        flat = flat.detach()
        self.dtype, self._device, self._event = flat.dtype, flat.device, None
        if flat.device.type != "cuda":
            self._host = flat.to("cpu", copy=True)
            return
        stream = _stream(flat.device)
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)  # its memory is not given to another before the copy is done
        self._event = stream.record_event()

    def bring(self) -> Tensor:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return self._host.to(self._device, non_blocking=True)


def _unpack(packed: _Here | _There) -> Tensor:
    return packed.unpack()


@functools.cache
def _stream(device: torch.device) -> Any:
    return _new_stream(device)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def _has_storage(tensor: Tensor) -> bool:
    # A subclass (a shard, a quantized tensor) may have several inside.
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _version(tensor: Tensor) -> int:
    version: int = 0 if tensor.is_inference() else tensor._version
    return version
