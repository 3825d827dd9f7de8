"""The presets that save memory build what they say."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit.facts import Hardware
from lightning_speedkit.memory import (
    ActivationCheckpointing,
    BatchSizeSearch,
    CacheRelease,
    LeakMonitor,
    OOMSnapshot,
    PeakMemory,
)
from lightning_speedkit.memory.presets import PRESETS

CPU = Hardware(accelerator="cpu", device_name="a CPU")
BUILT: dict[str, tuple[list[type], dict[str, Any]]] = {
    "checkpoint-activations": ([ActivationCheckpointing], {"modules": ("auto",), "policy": "full"}),
    "checkpoint-selective": ([ActivationCheckpointing], {"modules": ("auto",), "policy": "selective"}),
    "offload-activations": ([ActivationCheckpointing], {"modules": ("auto",), "policy": "offload"}),
    "largest-batch": ([BatchSizeSearch], {"target": "memory"}),
    "fastest-batch": ([BatchSizeSearch], {"target": "throughput"}),
    "watch-memory": ([LeakMonitor, OOMSnapshot, PeakMemory], {}),
    "release-cache": ([CacheRelease], {}),
}


def test_these_are_the_presets() -> None:
    assert [preset.name for preset in PRESETS] == list(BUILT)
    assert {preset.name for preset in PRESETS if preset.needs} == {"offload-activations"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_it_builds_what_it_says(preset: Any) -> None:
    patch = preset.patch_for(CPU)
    callbacks = [part.build() for part in patch.callbacks]
    classes, arguments = BUILT[preset.name]
    assert [type(callback) for callback in callbacks] == classes
    assert {name: getattr(callbacks[0], name) for name in arguments} == arguments
    assert (preset.kind, dict(patch.arguments), patch.plugins) == ("memory", {}, ())
