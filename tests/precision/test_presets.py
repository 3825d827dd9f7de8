"""The presets of precision build what they say, on every kind of machine."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision import SpeedkitMixedPrecision
from lightning_speedkit.precision.presets import PRESETS
from lightning_speedkit.registry import Preset

BY_NAME: dict[str, Preset] = {preset.name: preset for preset in PRESETS}
T4 = Hardware(accelerator="cuda", device_name="Tesla T4", capability=(7, 5))
A100 = Hardware(accelerator="cuda", device_name="A100", capability=(8, 0), native_bf16=True)
CPU = Hardware(accelerator="cpu", device_name="a CPU")
CPU_BF16 = Hardware(accelerator="cpu", device_name="a CPU", native_bf16=True)


def _set_by(preset: Preset, hardware: Hardware) -> Any:
    patch = preset.patch_for(hardware)
    assert patch.callbacks == ()
    plugins = [part.build() for part in patch.plugins]
    if not plugins:
        return dict(patch.arguments)
    (plugin,) = plugins
    assert type(plugin) is SpeedkitMixedPrecision
    assert dict(patch.arguments) == {}
    return plugin.precision


def test_the_names_the_kind_and_the_needs() -> None:
    assert {name: preset.needs for name, preset in BY_NAME.items()} == {
        "fp32": (),
        "bf16-mixed": ("capability>=8.0",),
        "fp16-mixed": ("gpu",),
        "precision-auto": (),
    }
    assert {preset.kind for preset in PRESETS} == {"precision"}


@pytest.mark.parametrize("hardware", [T4, A100, CPU, CPU_BF16])
def test_the_fixed_ones_do_not_depend_on_the_machine(hardware: Hardware) -> None:
    assert _set_by(BY_NAME["fp32"], hardware) == {"precision": "32-true"}
    assert _set_by(BY_NAME["bf16-mixed"], hardware) == "bf16-mixed"
    assert _set_by(BY_NAME["fp16-mixed"], hardware) == "16-mixed"


@pytest.mark.parametrize(
    ("hardware", "as_in"), [(T4, "fp16-mixed"), (A100, "bf16-mixed"), (CPU, "fp32"), (CPU_BF16, "bf16-mixed")]
)
def test_precision_auto_sets_what_the_fixed_one_sets(hardware: Hardware, as_in: str) -> None:
    assert BY_NAME["precision-auto"].patch_for(hardware) == BY_NAME[as_in].patch_for(hardware)
