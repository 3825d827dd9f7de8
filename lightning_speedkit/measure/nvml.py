"""What the first CUDA device is, asked of the driver's management library, so that CUDA stays untouched.

When it helps: torch's own questions (``get_device_capability``, ``get_device_name``) start CUDA in the process, after
which no forked process can use it, and Lightning refuses ``strategy="ddp_fork"`` and ``"ddp_notebook"``. What it costs:
a few calls in C. Where the library is missing or cannot tell which device torch will take as its first, the answer is
``None``, and torch has to be asked. Written after NVIDIA's NVML reference; never run on a machine with a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["CudaDevice", "read_first_device"]

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """Name, compute capability, and all memory of a device in bytes, some of which the driver keeps for itself."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def read_first_device(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDevice | None:
    """The device that CUDA will call 0, or ``None`` if that cannot be told without CUDA.

    ``load`` is what opens the library.

    >>> def missing(name):
    ...     raise OSError(name)
    >>> read_first_device(missing) is None
    True
    """
    try:
        library = load(_LIBRARY)
        with _opened(library):
            return _read(library)
    except (OSError, AttributeError, _Unknown):
        return None


class _Unknown(Exception):
    """A call failed, or several devices might be the first."""


@contextmanager
def _opened(library: Any) -> Iterator[None]:
    _call(library.nvmlInit_v2)
    try:
        yield
    finally:
        library.nvmlShutdown()


def _read(library: Any) -> CudaDevice:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.partition(",")[0].strip()
    count = ctypes.c_uint()
    _call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
    devices = [_device(library, index) for index in range(count.value)]
    alike = len(set(devices)) == 1
    if first is None and devices and (alike or _ordered_by_bus()):
        return devices[0]
    # A UUID, or a part of a device (MIG), is left to torch.
    if first is not None and first.isdecimal() and int(first) < len(devices) and (alike or _ordered_by_bus()):
        return devices[int(first)]
    raise _Unknown


def _ordered_by_bus() -> bool:
    """Whether CUDA counts devices as this library does; by default it begins with the fastest."""
    return os.environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"


def _device(library: Any, index: int) -> CudaDevice:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(handle))
    _call(library.nvmlDeviceGetName, handle, name, ctypes.c_uint(_NAME_BYTES))
    _call(library.nvmlDeviceGetCudaComputeCapability, handle, ctypes.byref(major), ctypes.byref(minor))
    _call(library.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))
    return CudaDevice(name.value.decode(errors="replace"), (major.value, minor.value), int(memory.total))


def _call(function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise _Unknown
