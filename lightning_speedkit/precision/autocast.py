"""The mixed precision that a device runs fastest, by what its hardware computes natively.

Mixed precision keeps the weights in float32 and runs matrix products and convolutions in 16 bits. It pays where the
device has units for that type, and costs time where the type is emulated. The choice is read off the hardware:

==============================================  ===============  ================================================
device                                          precision        why
==============================================  ===============  ================================================
NVIDIA, capability 8.0 and later                ``bf16-mixed``   native bf16; float32's range, so no loss scaling
NVIDIA, capability 7.x (V100, T4, RTX 20)       ``16-mixed``     fp16 tensor cores; bf16 is emulated and slow
NVIDIA, before 7.0                              ``32-true``      no tensor cores, and most have slow fp16 arithmetic
AMD, MI200 and later, RDNA 3 and later          ``bf16-mixed``   matrix units run bf16 as fast as fp16
AMD, older (MI100, MI50, Vega, RDNA 1 and 2)    ``16-mixed``     bf16 is absent, or half as fast as fp16
CPU with AVX512_BF16, AMX or Arm's BF16         ``bf16-mixed``   native bf16
any other CPU                                   ``32-true``      bf16 is emulated
XPU with native bf16                            ``bf16-mixed``   native bf16
MPS                                             ``32-true``      see below
==============================================  ===============  ================================================

On Apple's GPUs torch accepts bf16 from macOS 14 on, also where the chip emulates it (M1, M2), and does not say which
chip that is; what users report as gained is memory rather than time (karpathy/nanochat#793). float32 is what is
right on all of them; ask for ``"16-mixed"`` or ``"bf16-mixed"`` by name where a measurement says so.

Sources: NVIDIA's CUDA C++ Programming Guide, table of compute capabilities; AMD's CDNA 1 and CDNA 2 white papers;
``torch.cuda.is_bf16_supported()``, which by default counts emulation, so that a Tesla T4 says yes.
"""

from __future__ import annotations

import re

from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.precision.timing import measure_precision

__all__ = ["fastest_precision"]

_OLD_GFX9 = re.compile(r"\b(MI(25|50|60|100)|Vega|VII)\b", re.IGNORECASE)


def fastest_precision(hardware: Hardware | str | None = None, measure: bool = False) -> str:
    """The name of the Lightning precision that trains fastest on this hardware.

    Args:
        hardware: The machine to choose for; the name of an accelerator of this machine (``"auto"``, ``"cpu"``,
            ``"gpu"``, ``"cuda"``, ``"mps"``, ``"xpu"``); or ``None`` for the best accelerator there is.
        measure: Ask the device in place of the table, as
            :func:`~lightning_speedkit.precision.timing.measure_precision` does, which takes some seconds.

    Returns:
        ``"bf16-mixed"``, ``"16-mixed"`` or ``"32-true"``.

    Raises:
        ValueError: If an accelerator is named that is unknown, or that is not in this machine; or if a ``Hardware``
            is to be measured, which may be another machine.
        TypeError: If ``hardware`` is none of the above, or ``measure`` no truth value.

    >>> fastest_precision(Hardware(accelerator="cuda", device_name="Tesla T4", capability=(7, 5)))
    '16-mixed'
    >>> fastest_precision(Hardware(accelerator="cuda", device_name="A100", capability=(8, 0), native_bf16=True))
    'bf16-mixed'
    """
    if not isinstance(measure, bool):
        raise TypeError(f"measure={measure!r} must be True or False; got {type(measure).__name__}.")
    if measure:
        if isinstance(hardware, Hardware):
            raise ValueError("measure=True measures this machine: name an accelerator of it, or leave hardware out.")
        if hardware is None or isinstance(hardware, str):
            return measure_precision("auto" if hardware is None else hardware).fastest
    if hardware is None or isinstance(hardware, str):
        hardware = read_hardware("auto" if hardware is None else hardware)
    if not isinstance(hardware, Hardware):
        raise TypeError(f"hardware is a Hardware, the name of an accelerator or None, got {type(hardware).__name__}.")
    if hardware.accelerator == "cuda":
        return _fastest_on_rocm(hardware) if hardware.is_rocm else _fastest_on_cuda(hardware)
    if hardware.accelerator in ("cpu", "xpu") and hardware.native_bf16:
        return "bf16-mixed"
    return "32-true"


def _fastest_on_cuda(hardware: Hardware) -> str:
    if hardware.capability is None or hardware.capability < (7, 0):
        return "32-true"
    return "bf16-mixed" if hardware.native_bf16 and hardware.capability >= (8, 0) else "16-mixed"


def _fastest_on_rocm(hardware: Hardware) -> str:
    # torch says yes to bf16 on every AMD device, so the generation decides: gfx906, gfx908 (MI100) and gfx90a (MI200)
    # all report capability 9.0 and differ by name only; gfx10xx is RDNA 1 and 2.
    generation = hardware.capability or (9, 4)
    old = generation < (9, 0) or generation[0] == 10
    old = old or (generation == (9, 0) and _OLD_GFX9.search(hardware.device_name) is not None)
    return "16-mixed" if old or not hardware.native_bf16 else "bf16-mixed"
