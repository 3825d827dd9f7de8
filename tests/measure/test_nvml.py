"""The first CUDA device by the driver's library, which is played by a table of devices."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lightning_speedkit.measure.nvml import CudaDevice, read_first_device

T4, H100 = CudaDevice("Tesla T4", (7, 5), 16 * 2**30), CudaDevice("NVIDIA H100", (9, 0), 80 * 2**30)


class Library:
    """Answers as NVML does: results through pointers, and 0 if all went well."""

    def __init__(self, *devices: CudaDevice, fails: str = "") -> None:
        self.devices, self.open, self.fails = devices, 0, fails

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return (lambda *_: 999) if name == self.fails else getattr(self, f"play_{name}")

    def play_nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def play_nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def play_nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def play_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 1000 + index.value
        return 0

    def _of(self, handle: Any) -> CudaDevice:
        return self.devices[handle.value - 1000]

    def play_nvmlDeviceGetName(self, handle: Any, name: Any, length: Any) -> int:
        text = self._of(handle).name.encode()
        assert len(text) < length.value == ctypes.sizeof(name)
        name.value = text
        return 0

    def play_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._of(handle).capability
        return 0

    def play_nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._of(handle).memory_bytes
        return 0


@pytest.mark.parametrize(
    ("devices", "visible", "order", "expected"),
    [
        ((T4,), None, None, T4),
        ((T4, T4), None, None, T4),
        ((T4, H100), None, None, None),  # CUDA would begin with the fastest, which this library does not know
        ((T4, H100), None, "PCI_BUS_ID", T4),
        ((T4, H100), "1,0", "PCI_BUS_ID", H100),
        ((T4, H100), " 1 ", None, None),
        ((H100, H100), "1", None, H100),
        ((T4,), "3", None, None),
        ((T4,), "", None, None),
        ((T4,), "-1", None, None),
        ((T4,), "GPU-8f6d", None, None),
        ((T4,), "MIG-8f6d", None, None),
        ((), None, None, None),
    ],
)
def test_the_device_that_cuda_calls_0(
    devices: Any, visible: str | None, order: str | None, expected: CudaDevice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    library = Library(*devices)
    assert read_first_device(lambda _: library) == expected
    assert library.open == 0


@pytest.mark.parametrize("fails", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_library_that_fails_tells_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = Library(T4, fails=fails)
    assert read_first_device(lambda _: library) is None
    assert library.open == 0
    assert read_first_device(lambda _: object()) is None
