"""The most memory that a model needs while something runs, on a CPU by counting storages, on a GPU by its allocator.

A profiler's record of the CPU's allocator would have the buffers inside kernels in it too, but torch's profiler ends
one that runs already, and prints.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_speedkit.measure.memory_use import read_device_memory, reset_device_peak

__all__ = ["peak_mib", "wait_for"]

_MIB = 2**20


def peak_mib(model: nn.Module, inputs: Tensor, run: Callable[[], object]) -> float | None:
    """The most memory while ``run`` runs, in MiB: weights, buffers, inputs, and all tensors that are made in it.

    On the CPU every storage counts from when it is made until it is freed, buffers inside one kernel not. On a GPU it
    is what the counters of torch's allocator tell, whose peak is set back. ``None`` where a device keeps no peak.

    >>> x = torch.zeros(4, 3)
    >>> peak = peak_mib(nn.Linear(3, 2), x, lambda: torch.zeros(2**18) + 1)
    >>> round(peak, 3)
    2.0
    """
    there = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), inputs))
    if inputs.device.type == "cpu":
        counted: Any = _Counted()
        with counted:
            run()
        return (there + int(counted.peak)) / _MIB
    device = inputs.device
    if device.type not in ("cuda", "xpu"):
        return None
    reset_device_peak(device)
    before = read_device_memory(device)
    run()
    wait_for(device)
    after = read_device_memory(device)
    if before is None or after is None:
        return None
    return (there + after.peak_bytes - before.allocated_bytes) / _MIB


def wait_for(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


_Mode: Any = TorchDispatchMode  # untyped in some versions of torch


class _Counted(_Mode):  # type: ignore[misc]
    """While it is on, ``peak`` is the most bytes at once of the storages that were made since it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}  # by the address of a storage, which another one may get later

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):  # what is first met as an argument was there before
            self._see(tensor, counts=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._see(tensor, counts=True)
        return result

    def _see(self, tensor: object, counts: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts else 0
        if key in self._seen:
            return
        self._seen[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size
