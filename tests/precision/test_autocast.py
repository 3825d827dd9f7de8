"""Which precision a device runs fastest: a table of devices, given as facts and given as what torch says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure import hardware as measured
from lightning_speedkit.precision import fastest_precision

NVIDIA = [
    ("Tesla P100", (6, 0), "32-true"),
    ("GeForce GTX 1080", (6, 1), "32-true"),
    ("Tesla V100", (7, 0), "16-mixed"),
    ("Xavier", (7, 2), "16-mixed"),
    ("Tesla T4", (7, 5), "16-mixed"),
    ("A100", (8, 0), "bf16-mixed"),
    ("GeForce RTX 3090", (8, 6), "bf16-mixed"),
    ("L4", (8, 9), "bf16-mixed"),
    ("H100", (9, 0), "bf16-mixed"),
    ("B200", (10, 0), "bf16-mixed"),
    ("GeForce RTX 5090", (12, 0), "bf16-mixed"),
]
AMD = [
    ("Radeon VII", (9, 0), "16-mixed"),
    ("AMD Instinct MI50", (9, 0), "16-mixed"),
    ("AMD Instinct MI100", (9, 0), "16-mixed"),
    ("AMD Instinct MI210", (9, 0), "bf16-mixed"),
    ("AMD Instinct MI250X", (9, 0), "bf16-mixed"),
    ("AMD Instinct MI300X", (9, 4), "bf16-mixed"),
    ("AMD Instinct MI350X", (9, 5), "bf16-mixed"),
    ("AMD Radeon RX 6900 XT", (10, 3), "16-mixed"),
    ("AMD Radeon RX 7900 XTX", (11, 0), "bf16-mixed"),
    ("AMD Radeon RX 9070 XT", (12, 0), "bf16-mixed"),
]


@pytest.mark.parametrize(("name", "capability", "expected"), NVIDIA)
def test_nvidia(name: str, capability: tuple[int, int], expected: str) -> None:
    native = capability >= (8, 0)
    given = Hardware(accelerator="cuda", device_name=name, capability=capability, native_bf16=native)
    assert fastest_precision(given) == expected


@pytest.mark.parametrize(("name", "capability", "expected"), AMD)
def test_amd(name: str, capability: tuple[int, int], expected: str) -> None:
    given = Hardware(accelerator="cuda", device_name=name, capability=capability, native_bf16=True, is_rocm=True)
    assert fastest_precision(given) == expected


@pytest.mark.parametrize(
    ("accelerator", "native", "expected"),
    [
        ("cpu", True, "bf16-mixed"),
        ("cpu", False, "32-true"),
        ("xpu", True, "bf16-mixed"),
        ("xpu", False, "32-true"),
        ("mps", True, "32-true"),
        ("mps", False, "32-true"),
        ("tpu", False, "32-true"),
    ],
)
def test_other_devices(accelerator: str, native: bool, expected: str) -> None:
    assert fastest_precision(Hardware(accelerator=accelerator, device_name="", native_bf16=native)) == expected


@pytest.mark.parametrize("is_rocm", [False, True])
def test_a_gpu_that_is_said_to_lack_bf16(is_rocm: bool) -> None:
    given = Hardware(accelerator="cuda", device_name="", capability=(9, 0), native_bf16=False, is_rocm=is_rocm)
    assert fastest_precision(given) == "16-mixed"


def test_a_gpu_of_which_nothing_is_known() -> None:
    assert fastest_precision(Hardware(accelerator="cuda", device_name="?", native_bf16=True)) == "32-true"


def _pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], *, rocm: bool) -> None:
    """A torch that sees one GPU, and answers about bf16 as torch does: with emulation always yes."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or rocm or capability >= (8, 0)

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**34),
        "is_bf16_supported": is_bf16_supported,
    }
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    monkeypatch.setattr(torch.version, "hip", "6.4" if rocm else None)


@pytest.mark.parametrize("spelling", [None, "auto", "gpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "capability", "rocm", "expected"),
    [*((*row[:2], False, row[2]) for row in NVIDIA), *((*row[:2], True, row[2]) for row in AMD)],
)
def test_what_torch_says_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
    spelling: str | None,
    name: str,
    capability: tuple[int, int],
    rocm: bool,
    expected: str,
) -> None:
    _pretend(monkeypatch, name, capability, rocm=rocm)
    assert torch.cuda.is_bf16_supported()  # the question that a T4 answers with yes
    assert fastest_precision(spelling) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 f16c", "32-true"),
        ("avx2 avx512f", "32-true"),
        ("avx512f avx512_bf16", "bf16-mixed"),
        ("amx_tile amx_bf16", "bf16-mixed"),
        ("asimd bf16", "bf16-mixed"),
    ],
)
def test_the_cpu_of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch, flags: str, expected: str) -> None:
    _pretend(monkeypatch, "A100", (8, 0), rocm=False)
    monkeypatch.setattr(measured, "_cpu_flags", lambda: frozenset(flags.split()))
    assert fastest_precision("cpu") == expected


def test_an_accelerator_that_is_unknown_or_not_here() -> None:
    with pytest.raises(ValueError, match="accelerator='quantum' is unknown"):
        fastest_precision("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch does not see one here"):
            fastest_precision("cuda")


@pytest.mark.parametrize("wrong", [3, torch.device("cpu"), ("cpu",)])
def test_a_wrong_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match="hardware is a Hardware"):
        fastest_precision(wrong)


def test_whether_to_measure_is_true_or_false() -> None:
    wrong: Any = "no"
    with pytest.raises(TypeError, match="measure='no' must be True or False; got str"):
        fastest_precision("cpu", measure=wrong)
