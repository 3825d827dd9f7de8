"""What this machine is, as far as a choice of technique depends on it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine that a run is planned for.

    ``accelerator`` is Lightning's name of the device type: ``"cuda"`` (also AMD under ROCm, where ``is_rocm`` is
    true), ``"mps"``, ``"xpu"`` or ``"cpu"``. ``device_count`` counts accelerators, and is 1 on a CPU. ``capability``
    is CUDA's compute capability and ``None`` elsewhere. ``native_bf16`` says whether the device computes in bfloat16
    by itself; emulation counts as no. ``memory_bytes`` is the main memory, ``device_memory_bytes`` the memory of one
    accelerator (0 on a CPU).

    >>> Hardware(accelerator="cpu", device_name="a CPU", cpu_count=2, memory_bytes=8 * 2**30).describe()
    'a CPU (cpu), 2 CPU cores, 8.0 GiB of memory'
    """

    accelerator: str
    device_name: str
    device_count: int = 1
    capability: tuple[int, int] | None = None
    is_rocm: bool = False
    native_bf16: bool = False
    device_memory_bytes: int = 0
    cpu_count: int = 1
    memory_bytes: int = 0

    def describe(self) -> str:
        """One line for a person."""
        devices = f"{self.device_count} x {self.device_name}" if self.device_count > 1 else self.device_name
        capability = "" if self.capability is None else f", capability {self.capability[0]}.{self.capability[1]}"
        memory = f"{self.memory_bytes / 2**30:.1f} GiB of memory"
        return f"{devices} ({self.accelerator}{capability}), {self.cpu_count} CPU cores, {memory}"
