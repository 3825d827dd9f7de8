"""Memory in use: the host's numbers against an allocation of known size, a device's against counters made up here."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.measure import memory_use
from lightning_speedkit.measure.memory_use import (
    DeviceMemory,
    read_available_bytes,
    read_device_memory,
    read_host_bytes,
    read_host_peak_bytes,
    read_private_bytes,
    reset_device_peak,
)

_CUDA, _MIB = torch.device("cuda", 0), 1 << 20


def test_the_host_numbers_see_an_allocation_and_the_peak_remembers_it() -> None:
    gc.collect()
    before = read_host_bytes(), read_private_bytes()
    pages = mmap.mmap(-1, 64 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what malloc still holds
    array = np.frombuffer(pages, dtype=np.uint8)
    array.fill(1)
    after = read_host_bytes(), read_private_bytes(), read_host_peak_bytes()
    if None in before or None in after:
        pytest.skip("this system does not tell")
    assert array.nbytes == 64 * _MIB
    assert 56 * _MIB < after[0] - before[0] < 80 * _MIB  # type: ignore[operator]
    assert 56 * _MIB < after[1] - before[1] < 80 * _MIB  # type: ignore[operator]
    assert after[2] >= after[0] - _MIB  # type: ignore[operator]
    del array
    pages.close()
    assert read_host_bytes() < after[0] - 32 * _MIB  # type: ignore[operator]
    assert read_host_peak_bytes() >= after[2] - 4 * _MIB  # type: ignore[operator]


def test_a_device_is_read_from_the_counters_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {
        "allocated_bytes": {"all": {"current": 30, "peak": 70}},
        "reserved_bytes": {"all": {"current": 120, "peak": 200}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    memory = read_device_memory(_CUDA)
    assert memory == DeviceMemory(allocated_bytes=30, peak_bytes=70, reserved_bytes=120)
    assert memory is not None
    assert (memory.fragmented_bytes, memory.fragmented_share) == (90, 0.75)
    stats.clear()  # before the first allocation
    assert read_device_memory(_CUDA) == DeviceMemory(allocated_bytes=0, peak_bytes=0, reserved_bytes=0)
    assert DeviceMemory(allocated_bytes=0, peak_bytes=0, reserved_bytes=0).fragmented_share == 0.0


def test_the_peak_is_set_back_on_the_device_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", devices.append)
    reset_device_peak(_CUDA)
    reset_device_peak(torch.device("cpu"))
    assert devices == [_CUDA]


def test_what_is_free_is_asked_of_the_device_and_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert read_available_bytes(_CUDA) == 5
    free = read_available_bytes(torch.device("cpu"))
    assert free is None or free > _MIB
    assert read_available_bytes(torch.device("meta")) is None


def test_where_the_system_tells_nothing_the_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(memory_use, "open", absent, raising=False)
    monkeypatch.setattr(memory_use.Path, "read_bytes", absent)
    assert read_host_bytes() is None
    assert read_private_bytes() is None
    assert read_available_bytes(torch.device("cpu")) is None
    assert read_host_peak_bytes() is not None  # by getrusage
