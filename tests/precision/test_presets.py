"""The presets of precision build what they say, on every kind of machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit.errors import HardwareNeedError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision import Float8Precision, SpeedkitMixedPrecision
from lightning_speedkit.precision.channels_last import ChannelsLast
from lightning_speedkit.precision.compile import CompileModel
from lightning_speedkit.precision.presets import PRESETS
from lightning_speedkit.presets import trainer_kwargs
from lightning_speedkit.registry import Preset
from tests.presets.machines import stand_on

BY_NAME: dict[str, Preset] = {preset.name: preset for preset in PRESETS}
T4 = Hardware(accelerator="cuda", device_name="Tesla T4", capability=(7, 5))
A100 = Hardware(accelerator="cuda", device_name="A100", capability=(8, 0), native_bf16=True)
CPU = Hardware(accelerator="cpu", device_name="a CPU")
CPU_BF16 = Hardware(accelerator="cpu", device_name="a CPU", native_bf16=True)
_COMPILE = ("compile", "compile-blocks", "channels-last")


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
        "tf32": ("cuda", "capability>=8.0"),
        "bf16-mixed": ("capability>=8.0", "native-bf16"),
        "bf16-true": ("capability>=8.0", "native-bf16"),
        "fp16-mixed": ("gpu",),
        "fp8": ("cuda", "capability>=8.9", "extra:fp8"),
        "precision-auto": (),
        **dict.fromkeys(_COMPILE, ()),
    }
    assert {name: preset.kind for name, preset in BY_NAME.items() if preset.kind != "precision"} == dict.fromkeys(
        _COMPILE, "compile"
    )


def test_compile_and_layout_are_callbacks_alone() -> None:
    patches = [BY_NAME[name].patch_for(CPU) for name in _COMPILE]
    assert [(dict(patch.arguments), patch.plugins, len(patch.callbacks)) for patch in patches] == [({}, (), 1)] * 3
    whole, blocks, layout = (patch.callbacks[0].build() for patch in patches)
    assert (type(whole), whole.modules) == (CompileModel, ("auto",))
    assert (type(blocks), blocks.modules) == (CompileModel, ("blocks",))
    assert type(layout) is ChannelsLast


@pytest.mark.parametrize("hardware", [T4, A100, CPU, CPU_BF16])
def test_the_fixed_ones_do_not_depend_on_the_machine(hardware: Hardware) -> None:
    assert _set_by(BY_NAME["fp32"], hardware) == {"precision": "32-true"}
    assert _set_by(BY_NAME["bf16-mixed"], hardware) == "bf16-mixed"
    assert _set_by(BY_NAME["fp16-mixed"], hardware) == "16-mixed"
    assert _set_by(BY_NAME["bf16-true"], hardware) == {"precision": "bf16-true"}
    tf32, fp8 = (BY_NAME[name].patch_for(hardware) for name in ("tf32", "fp8"))
    assert dict(tf32.arguments) == {"precision": "32-true"}
    assert vars(tf32.callbacks[0].build()).items() >= {"matmul": "high", "convolutions": "tf32"}.items()
    assert isinstance(fp8.plugins[0].build(), Float8Precision)


@pytest.mark.parametrize(
    ("name", "hardware", "told"),
    [
        ("tf32", T4, "compute capability 8.0 or higher; this machine has Tesla T4"),
        ("tf32", CPU, "a CUDA device"),
        ("bf16-mixed", T4, "compute capability 8.0 or higher"),
        ("bf16-true", T4, "compute capability 8.0 or higher"),
        ("fp16-mixed", CPU, "a GPU"),
        ("fp8", A100, r"compute capability 8.9 or higher; this machine has A100 \(cuda, capability 8.0\)"),
        ("fp8", CPU, "a CUDA device"),
    ],
)
def test_a_machine_that_cannot_run_one_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, hardware: Hardware, told: str
) -> None:
    stand_on(monkeypatch, hardware)
    with pytest.raises(HardwareNeedError, match=f"The preset '{name}' needs {told}"):
        trainer_kwargs(name)


def test_bf16_true_trains_in_bf16() -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    kwargs = trainer_kwargs("bf16-true", accelerator="cpu", max_steps=2, limit_val_batches=0, **quiet)
    model = BoringModel()
    Trainer(**kwargs, enable_model_summary=False).fit(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("hardware", "as_in"), [(T4, "fp16-mixed"), (A100, "bf16-mixed"), (CPU, "fp32"), (CPU_BF16, "bf16-mixed")]
)
def test_precision_auto_sets_what_the_fixed_one_sets(hardware: Hardware, as_in: str) -> None:
    assert BY_NAME["precision-auto"].patch_for(hardware) == BY_NAME[as_in].patch_for(hardware)
