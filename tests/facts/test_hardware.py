"""The description of a machine, in the cases that differ."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from lightning_speedkit.facts import Hardware

GPU = Hardware(
    accelerator="cuda",
    device_name="NVIDIA A100",
    device_count=4,
    capability=(8, 0),
    native_bf16=True,
    device_memory_bytes=80 * 2**30,
    cpu_count=32,
    memory_bytes=256 * 2**30,
)


def test_several_devices_are_counted_and_the_capability_is_named() -> None:
    assert GPU.describe() == "4 x NVIDIA A100 (cuda, capability 8.0), 32 CPU cores, 256.0 GiB of memory"


def test_one_device_is_not_counted() -> None:
    one = dataclasses.replace(GPU, device_count=1, capability=None, accelerator="mps", device_name="Apple M2")
    assert one.describe() == "Apple M2 (mps), 32 CPU cores, 256.0 GiB of memory"


def test_it_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(GPU)) == GPU
    assert hash(GPU) == hash(dataclasses.replace(GPU))
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPU.device_count = 1  # type: ignore[misc]
