"""The bundles: what each sets, and that its precision follows the device that the run really uses."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_speedkit.presets import trainer_kwargs
from lightning_speedkit.presets.bundles import PRESETS
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.registry import Preset
from tests.presets.machines import CPU, CPU_BF16, H100, T4, TWO_H100, stand_on


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)


def _precision(kwargs: dict[str, Any]) -> str | None:
    """The precision that a Trainer with these arguments has."""
    plugins = [plugin for plugin in kwargs.get("plugins", []) if hasattr(plugin, "precision")]
    return plugins[0].precision if plugins else kwargs.get("precision")


@pytest.mark.parametrize("bundle", PRESETS, ids=lambda preset: preset.name)
def test_a_bundle_is_in_the_catalogue_and_so_is_all_that_it_includes(bundle: Preset) -> None:
    assert REGISTRY.get(bundle.name) is bundle
    assert bundle.kind == "bundle"
    assert "precision-auto" in bundle.includes
    assert {REGISTRY.get(name).kind for name in bundle.includes}.isdisjoint({"bundle"})


def test_low_memory_keeps_the_effective_batch() -> None:
    """Its summary tells to divide the batch size by 4: so many batches make one step."""
    (schedule,) = [c.schedule for c in trainer_kwargs("low-memory")["callbacks"] if hasattr(c, "schedule")]
    assert schedule in (4, {0: 4})
    assert "by 4" in REGISTRY.get("low-memory").summary


@pytest.mark.parametrize(
    ("name", "arguments", "callbacks", "precision"),
    [
        ("single-gpu", {"accelerator": "gpu", "devices": 1, "benchmark": True}, [], "bf16-mixed"),
        (
            "multi-gpu",
            {"accelerator": "gpu", "devices": "auto", "benchmark": True, "strategy": "speedkit_ddp"},
            [],
            "bf16-mixed",
        ),
        ("low-memory", {}, ["AccumulationScheduler", "ActivationCheckpointing"], "bf16-mixed"),
    ],
)
def test_what_a_bundle_sets_on_two_h100(
    name: str, arguments: dict[str, Any], callbacks: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_on(monkeypatch, TWO_H100, cpu=CPU)
    kwargs = trainer_kwargs(name)
    assert [plugin.precision for plugin in kwargs.pop("plugins")] == [precision]
    assert [type(callback).__name__ for callback in kwargs.pop("callbacks", [])] == callbacks
    assert kwargs == arguments


def test_a_named_preset_beats_one_that_a_bundle_includes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer_kwargs("cpu", "fp32")["precision"] == "32-true"
    stand_on(monkeypatch, TWO_H100)
    assert trainer_kwargs("multi-gpu", "ddp-static")["strategy"] == "speedkit_ddp_static"
    assert _precision(trainer_kwargs("single-gpu", "fp16-mixed", "low-memory")) == "16-mixed"


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (TWO_H100, {}, "bf16-mixed"),
        (T4, {}, "16-mixed"),
        (TWO_H100, {"accelerator": "cpu"}, "32-true"),
        (TWO_H100, {"accelerator": CPUAccelerator()}, "32-true"),
        (CPU, {"accelerator": "cpu"}, "32-true"),
        (CPU_BF16, {"accelerator": "cpu"}, "bf16-mixed"),
    ],
)
@pytest.mark.parametrize("bundle", ["single-gpu", "low-memory"])
def test_a_bundle_chooses_the_precision_for_the_accelerator_of_the_run(
    bundle: str, machine: Any, overrides: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_on(monkeypatch, machine)
    assert _precision(trainer_kwargs(bundle, **overrides)) == expected


def test_the_cpu_bundle_chooses_for_the_cpu_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, H100, cpu=CPU)
    assert trainer_kwargs("cpu") == {"accelerator": "cpu", "devices": 1, "precision": "32-true"}
