"""Reads what this machine is. Asks torch, the driver and the operating system, and changes nothing.

CUDA is not started for it where the driver's management library answers: forked processes can use CUDA afterwards.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure.nvml import CudaDevice, read_first_device

__all__ = ["read_hardware"]


_cuda_is_started: Callable[[], bool] = torch.cuda.is_initialized  # untyped in torch


def read_hardware(accelerator: str = "auto") -> Hardware:
    """The machine, seen from the given accelerator.

    ``accelerator`` is ``"auto"`` (the best one there is), ``"gpu"``, ``"cuda"``, ``"mps"``, ``"xpu"`` or ``"cpu"``.
    A CUDA device that emulates bfloat16 counts as one without: torch's own
    ``torch.cuda.is_bf16_supported()`` says yes on a Tesla T4 (capability 7.5), which has no bf16 units.

    >>> read_hardware("cpu").accelerator
    'cpu'
    """
    kind = _resolve(accelerator)
    cpu_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = _main_memory_bytes()
    if kind == "cuda":
        first = _first_cuda_device()
        is_rocm = torch.version.hip is not None
        return Hardware(
            accelerator="cuda",
            device_name=first.name,
            device_count=torch.cuda.device_count(),
            capability=first.capability,
            is_rocm=is_rocm,
            native_bf16=is_rocm or first.capability >= (8, 0),
            device_memory_bytes=first.memory_bytes,
            cpu_count=cpu_count,
            memory_bytes=memory,
        )
    if kind == "mps":
        name, native = f"Apple {platform.machine()}", torch.backends.mps.is_macos_or_newer(14, 0)
        return Hardware(
            accelerator="mps", device_name=name, native_bf16=native, cpu_count=cpu_count, memory_bytes=memory
        )
    if kind == "xpu":
        return Hardware(
            accelerator="xpu",
            device_name=torch.xpu.get_device_name(0),
            device_count=torch.xpu.device_count(),
            native_bf16=torch.xpu.is_bf16_supported(including_emulation=False),
            device_memory_bytes=torch.xpu.get_device_properties(0).total_memory,
            cpu_count=cpu_count,
            memory_bytes=memory,
        )
    return Hardware(
        accelerator="cpu",
        device_name=_cpu_name(),
        native_bf16=_cpu_has_native_bf16(),
        cpu_count=cpu_count,
        memory_bytes=memory,
    )


def _first_cuda_device() -> CudaDevice:
    """It stands for all: a run on unlike devices goes at the pace of the slowest anyway."""
    if torch.version.hip is None and not _cuda_is_started() and (found := read_first_device()):
        return found
    capability = torch.cuda.get_device_capability(0)
    memory = torch.cuda.get_device_properties(0).total_memory
    return CudaDevice(torch.cuda.get_device_name(0), (capability[0], capability[1]), memory)


def _resolve(accelerator: str) -> str:
    kind = accelerator.lower()
    if kind == "cpu":
        return kind
    there: dict[str, Callable[[], bool]] = {
        "cuda": lambda: torch.cuda.device_count() > 0,  # is_available() by itself keeps forks from using CUDA
        "mps": torch.backends.mps.is_available,
        "xpu": torch.xpu.is_available,
    }
    if kind in ("auto", "gpu"):
        found = next((name for name, available in there.items() if available()), None)
        if found is None and kind == "gpu":
            raise ValueError("accelerator='gpu' was asked for, and torch sees no GPU here. Use 'auto' or 'cpu'.")
        return found or "cpu"
    if kind not in there:
        raise ValueError(f"accelerator={accelerator!r} is unknown; use one of auto, cpu, gpu, {', '.join(there)}.")
    if not there[kind]():
        raise ValueError(f"accelerator={accelerator!r} was asked for, and torch does not see one here.")
    return kind


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _cpu_has_native_bf16() -> bool:
    # x86: AVX512_BF16 or AMX tiles; Arm: the BF16 extension. AVX2 alone emulates.
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _main_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
