"""Machines to plan for, and a way to stand on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_speedkit.facts import Hardware
from lightning_speedkit.presets import explain, needs, selection

CPU = Hardware(accelerator="cpu", device_name="a CPU", native_bf16=False, cpu_count=2)
CPU_BF16 = Hardware(accelerator="cpu", device_name="a CPU with AMX", native_bf16=True, cpu_count=2)
T4 = Hardware(accelerator="cuda", device_name="Tesla T4", capability=(7, 5), native_bf16=False)
H100 = Hardware(accelerator="cuda", device_name="H100", capability=(9, 0), native_bf16=True)
TWO_H100 = Hardware(accelerator="cuda", device_name="H100", device_count=2, capability=(9, 0), native_bf16=True)

FOUR_H100 = replace(TWO_H100, device_count=4)


def stand_on(monkeypatch: pytest.MonkeyPatch, best: Hardware, cpu: Hardware = CPU) -> None:
    """From here on the presets see this machine, with all extras, in place of the one that the tests run on."""
    install_extras(monkeypatch)
    monkeypatch.setattr(selection, "read_hardware", reader(best, cpu))
    monkeypatch.setattr(explain, "read_hardware", reader(best, cpu))


def install_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the libraries of every extra count as installed."""
    monkeypatch.setattr(needs, "_is_known", lambda extra: True)
    monkeypatch.setattr(needs, "_missing_libraries", lambda extra: [])


def reader(best: Hardware, cpu: Hardware) -> Callable[[str], Hardware]:
    there = {"auto": best, "cpu": best if best.accelerator == "cpu" else cpu}
    if best.accelerator != "cpu":
        there |= {"gpu": best, best.accelerator: best}

    def read(accelerator: str = "auto") -> Hardware:
        if accelerator not in there:
            raise ValueError(f"accelerator={accelerator!r} was asked for, and there is none here.")
        return there[accelerator]

    return read
