"""How much memory a process and a device use now, and at most so far.

What it does: reads counters that the kernel and torch's allocators keep anyway. When it helps: to watch a run. What it
costs: some microseconds per reading; never a wait for the device. Source: ``/proc/self/statm`` and
``/proc/self/status`` of Linux; elsewhere ``getrusage``, which knows the peak alone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "DeviceMemory",
    "read_available_bytes",
    "read_device_memory",
    "read_host_bytes",
    "read_host_peak_bytes",
    "read_private_bytes",
    "reset_device_peak",
]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What torch's allocator holds on a device, in bytes: in tensors now, in tensors at most, and from the driver."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int

    @property
    def fragmented_bytes(self) -> int:
        """What the allocator holds and no tensor uses: cached for later, or in pieces too small for what is asked."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def fragmented_share(self) -> float:
        """The same as a part of what it holds, 0 to 1.

        >>> DeviceMemory(allocated_bytes=3, peak_bytes=4, reserved_bytes=4).fragmented_share
        0.25
        """
        return self.fragmented_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def read_host_bytes() -> int | None:
    """Physical memory of this process, with files that it has mapped; ``None`` where the system does not tell.

    >>> now = read_host_bytes()
    >>> now is None or now > 1_000_000
    True
    """
    pages = _statm()
    return None if pages is None else pages[0] * _PAGE


def read_private_bytes() -> int | None:
    """The same without what it shares: mapped files, which the system takes back, and batches of worker processes.

    A store that is read through ``mmap`` makes the whole number rise for an epoch without any leak, this one not.
    """
    pages = _statm()
    return None if pages is None else (pages[0] - pages[1]) * _PAGE


def read_host_peak_bytes() -> int | None:
    """The most physical memory that this process ever had.

    >>> peak = read_host_peak_bytes()
    >>> peak is None or peak > 1_000_000
    True
    """
    found = _from_table("/proc/self/status", b"VmHWM:")
    if found is not None or sys.platform == "win32":
        return found
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """What the allocator of a device holds; ``None`` for the CPU, and for a device that keeps no such counters.

    >>> read_device_memory(torch.device("cpu")) is None
    True
    """
    module: Any = getattr(torch, device.type, None)
    if device.type in ("cuda", "xpu") and hasattr(module, "memory_stats"):
        read = getattr(module, "memory_stats_as_nested_dict", None)
        if read is not None:  # four times quicker than memory_stats, which sorts them all
            stats = read(device)
            if not stats:  # not used yet
                return DeviceMemory(allocated_bytes=0, peak_bytes=0, reserved_bytes=0)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return DeviceMemory(
                allocated_bytes=allocated["current"], peak_bytes=allocated["peak"], reserved_bytes=reserved["current"]
            )
        flat = module.memory_stats(device)
        return DeviceMemory(
            allocated_bytes=flat.get("allocated_bytes.all.current", 0),
            peak_bytes=flat.get("allocated_bytes.all.peak", 0),
            reserved_bytes=flat.get("reserved_bytes.all.current", 0),
        )
    if device.type == "mps" and hasattr(module, "current_allocated_memory"):
        now = module.current_allocated_memory()
        return DeviceMemory(allocated_bytes=now, peak_bytes=now, reserved_bytes=module.driver_allocated_memory())
    return None


def reset_device_peak(device: torch.device) -> None:
    """Let the peak of a device count from now on; for all who read it. Nothing on the CPU.

    >>> reset_device_peak(torch.device("cpu"))
    """
    reset = getattr(getattr(torch, device.type, None), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def read_available_bytes(device: torch.device) -> int | None:
    """What can still be had without swapping: on the host for the CPU, else on the device; ``None`` if unknown.

    >>> free = read_available_bytes(torch.device("cpu"))
    >>> free is None or free > 0
    True
    """
    if device.type == "cpu":
        return _from_table("/proc/meminfo", b"MemAvailable:")
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    if ask is None:
        return None
    free: int = ask(device)[0]
    return free


def _statm() -> tuple[int, int] | None:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - a Path costs as much as the reading
            fields = file.read().split()
    except OSError:
        return None
    return int(fields[1]), int(fields[2])


def _from_table(path: str, key: bytes) -> int | None:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith(key)), None)
