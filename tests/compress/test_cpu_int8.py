"""Which CPUs add 8-bit products exactly: by the flags that torch reports, and by those of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from lightning_speedkit.compress.cpu_int8 import has_exact_int8


@pytest.mark.parametrize(
    ("machine", "flags", "exact"),
    [
        ("x86_64", {"avx2": True, "avx512_vnni": True, "avx_vnni": False}, True),
        ("x86_64", {"avx2": True, "avx512_vnni": False, "avx_vnni": True}, True),
        ("AMD64", {"avx2": True, "avx_vnni": True}, True),  # Windows
        ("AMD64", {"avx2": True, "avx512_vnni": False, "avx_vnni": False}, False),
        ("i686", {}, False),
        # other instructions than those of sums in 32 bits of 8-bit products
        ("x86_64", {"avx512_bw": True, "avx512_vbmi": True, "avx512_4vnniw": True, "avx_vnni_int16": True}, False),
        ("aarch64", {}, True),
        ("arm64", {}, True),  # macOS
    ],
)
def test_by_the_flags(machine: str, flags: dict[str, bool], exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert has_exact_int8() is exact


@pytest.mark.parametrize(("machine", "exact"), [("x86_64", False), ("aarch64", True)])
def test_a_torch_that_does_not_tell_is_taken_for_the_worse(
    machine: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_exact_int8() is exact


def test_this_machine_has_what_its_kernel_says() -> None:
    told = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not told.exists() or not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("needs Linux on x86-64 and torch.cpu.get_capabilities")
    (flags, *_) = (line.split(":")[1].split() for line in told.read_text().splitlines() if line.startswith("flags"))
    assert has_exact_int8() is bool({"avx512_vnni", "avx_vnni"} & set(flags))
