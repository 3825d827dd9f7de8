"""Reading the machine: what torch and the system say, under torch's answers for devices that are not here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_speedkit.measure import hardware, read_hardware
from lightning_speedkit.measure.nvml import CudaDevice


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(hardware, "read_first_device", lambda: None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)


def _has_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=16 * 2**30)
    )


@pytest.mark.parametrize("asked", ["auto", "gpu", "cuda", "CUDA"])
def test_cuda_is_read_as_torch_tells_it(asked: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _has_cuda(monkeypatch, (8, 6))
    found = read_hardware(asked)
    assert (found.accelerator, found.device_count, found.capability) == ("cuda", 2, (8, 6))
    assert (found.device_name, found.native_bf16, found.device_memory_bytes) == ("a GPU", True, 16 * 2**30)


def test_emulated_bf16_counts_as_none(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _has_cuda(monkeypatch, (7, 5))
    assert not read_hardware("cuda").native_bf16
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose devices have no such capability
    assert read_hardware("cuda").native_bf16


def test_cuda_is_not_started_where_the_driver_answers(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("this starts CUDA")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("is_available", "get_device_capability", "get_device_name", "get_device_properties", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, started)
    monkeypatch.setattr(hardware, "read_first_device", lambda: CudaDevice("NVIDIA H100", (9, 0), 80 * 2**30))
    found = read_hardware("auto")
    assert (found.device_name, found.capability, found.native_bf16) == ("NVIDIA H100", (9, 0), True)
    assert (found.device_count, found.device_memory_bytes) == (4, 80 * 2**30)


def test_the_cpu_can_be_asked_for_beside_a_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _has_cuda(monkeypatch, (9, 0))
    found = read_hardware("cpu")
    assert (found.accelerator, found.device_count, found.capability, found.device_memory_bytes) == ("cpu", 1, None, 0)


def test_apple_and_intel_devices_are_found(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 14)
    assert (read_hardware().accelerator, read_hardware("gpu").native_bf16) == ("mps", True)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 3)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device=None: "an XPU")
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=5))
    found = read_hardware()
    assert (found.accelerator, found.device_count, found.native_bf16, found.device_memory_bytes) == ("xpu", 3, False, 5)


@pytest.mark.parametrize(
    ("asked", "told"), [("gpu", "no GPU here"), ("cuda", "does not see one"), ("tpv", "unknown; use one of auto, cpu")]
)
def test_what_is_not_there_is_refused(asked: str, told: str, no_gpu: None) -> None:
    with pytest.raises(ValueError, match=told):
        read_hardware(asked)


@pytest.mark.parametrize(
    ("flags", "native"),
    [("fpu avx2 fma", False), ("fpu avx512f avx512_bf16", True), ("amx_tile amx_bf16", True), ("asimd bf16", True)],
)
def test_native_bf16_of_a_cpu_is_read_from_its_flags(flags: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"model name\t: Some CPU @ 2 GHz\nflags\t\t: {flags}\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *args, **kwargs: lines)
    for cached in (hardware._cpu_flags, hardware._cpu_name):
        cached.cache_clear()
    try:
        found = read_hardware("cpu")
    finally:
        monkeypatch.undo()
        for cached in (hardware._cpu_flags, hardware._cpu_name):
            cached.cache_clear()
    assert (found.native_bf16, found.device_name) == (native, "Some CPU @ 2 GHz")


def test_a_system_without_proc_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "sysconf", missing)
    for cached in (hardware._cpu_flags, hardware._cpu_name):
        cached.cache_clear()
    try:
        found = read_hardware("cpu")
    finally:
        monkeypatch.undo()
        for cached in (hardware._cpu_flags, hardware._cpu_name):
            cached.cache_clear()
    assert found.device_name
    assert not found.native_bf16
    assert found.memory_bytes == 0


def test_the_real_machine_is_read_without_changing_the_random_state() -> None:
    before = torch.get_rng_state()
    found = read_hardware("cpu")
    assert found.cpu_count >= 1
    assert found.memory_bytes > 2**28
    assert torch.equal(torch.get_rng_state(), before)
