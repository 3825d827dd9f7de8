"""Whether this CPU adds products of 8-bit numbers exactly."""

from __future__ import annotations

import platform

import torch

__all__ = ["has_exact_int8"]

_X86 = ("x86_64", "amd64", "i386", "i686")


def has_exact_int8() -> bool:
    """Whether sums of 8-bit products are kept in 32 bits here.

    Without VNNI an x86 CPU adds them in 16 bits, where they overflow without a word, so weights have to be kept to 7
    bits (measured on AVX2: relative error 0.3 instead of 0.007).
    """
    if platform.machine().lower() not in _X86:
        return True
    try:
        found = torch.cpu.get_capabilities()
    except AttributeError:  # torch before 2.11
        return False
    return bool(found.get("avx512_vnni") or found.get("avx_vnni"))
