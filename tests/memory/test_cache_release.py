"""CacheRelease: when it releases, counted by hand; that training is unchanged, against a plain run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_speedkit.measure.memory_use import DeviceMemory
from lightning_speedkit.memory import cache_release
from lightning_speedkit.memory.cache_release import CacheRelease, release_cache
from tests.conformance.models import classifier, loader, quiet_trainer


def _fit(*callbacks: Callback, **options: Any) -> list[Tensor]:
    model = classifier()
    torch.manual_seed(3)
    quiet_trainer(list(callbacks), max_epochs=2, **options).fit(model, loader(), loader())
    return model.losses


def test_it_releases_at_the_borders_of_phases_and_changes_nothing() -> None:
    release = CacheRelease(trim_host=True)
    torch.testing.assert_close(_fit(release, num_sanity_val_steps=2), _fit(), rtol=0, atol=0)
    assert release.releases == 4  # before and after each of two validations; not around the sanity check
    off = CacheRelease(between_phases=False)
    _fit(off)
    assert (off.releases, off.released_bytes) == (0, 0)


def test_garbage_is_collected() -> None:
    class Node:
        other: Any

    one = Node()
    one.other, gone = one, weakref.ref(one)
    gc.disable()
    try:
        del one
        assert gone() is not None
        release_cache(torch.device("cpu"))
    finally:
        gc.enable()
    assert gone() is None


def test_fragmentation_is_looked_at_now_and_then_and_released_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    held = {"reserved_bytes": 100, "allocated_bytes": 40, "peak_bytes": 40}

    def read(device: torch.device) -> DeviceMemory:
        looks.append(held["reserved_bytes"])
        return DeviceMemory(**held)

    def empty(device: torch.device) -> None:
        held["reserved_bytes"] = 45

    monkeypatch.setattr(cache_release, "read_device_memory", read)
    monkeypatch.setattr(cache_release, "release_memory", empty)
    release = CacheRelease(between_phases=False, fragmentation=0.5, check_every=2)
    _fit(release)
    assert (release.releases, release.released_bytes) == (1, 55)  # 60 of 100, then 5 of 45, are in no tensor
    assert len(looks) == 2 * 3 + 2  # six batches an epoch, and before and after the one release
    held.update(reserved_bytes=100)
    never = CacheRelease(between_phases=False, fragmentation=1, check_every=1)
    _fit(never)
    assert never.releases == 0


def test_host_memory_goes_back_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(cache_release, "_malloc_trim", lambda: called.append)
    release_cache(torch.device("cpu"))
    assert called == []
    release_cache(torch.device("cpu"), trim_host=True)
    assert called == [0]
    monkeypatch.setattr(cache_release, "_malloc_trim", lambda: None)  # as on a Mac
    assert release_cache(torch.device("cpu"), trim_host=True) >= 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"between_phases": "no"}, TypeError, "True or False"),
        ({"trim_host": 1}, TypeError, "True or False"),
        ({"fragmentation": "0.5"}, TypeError, "number above 0"),
        ({"fragmentation": 0}, ValueError, "above 0 and at most 1"),
        ({"fragmentation": 30}, ValueError, "above 0 and at most 1"),
        ({"check_every": 0}, ValueError, "check_every=0 must be 1 or more"),
        ({"check_every": 2.0}, TypeError, "whole number of batches"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CacheRelease(**arguments)
