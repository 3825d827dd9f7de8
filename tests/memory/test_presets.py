"""The presets that save memory build what they say."""

from __future__ import annotations

from lightning_speedkit.facts import Hardware
from lightning_speedkit.memory import ActivationCheckpointing
from lightning_speedkit.memory.presets import PRESETS

CPU = Hardware(accelerator="cpu", device_name="a CPU")


def test_checkpoint_activations_needs_no_argument() -> None:
    (preset,) = PRESETS
    patch = preset.patch_for(CPU)
    callbacks = [part.build() for part in patch.callbacks]
    assert (preset.name, preset.kind, preset.needs) == ("checkpoint-activations", "memory", ())
    assert [type(callback) for callback in callbacks] == [ActivationCheckpointing]
    assert callbacks[0].modules == ("auto",)
    assert (dict(patch.arguments), patch.plugins) == ({}, ())
