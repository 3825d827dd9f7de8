"""Every preset of the kit: its lines run, its data is sound, and bundles are what they say."""

from __future__ import annotations

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.plugins import Precision

from lightning_speedkit.presets import get, names, trainer_kwargs
from tests.presets.machines import CPU, FOUR_H100, stand_on

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_the_catalogue_is_this() -> None:
    assert names() == (
        *("fp32", "tf32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp8", "precision-auto"),
        *("compile", "compile-blocks", "channels-last"),
        *("accumulate-4", "accumulate-labels-4", "batch-256", "auto-micro-batch", "auto-micro-batch-labels"),
        *("clip-norm", "clip-zclip", "guard-non-finite", "guard-spikes", "guard-rollback"),
        *("adamw", "adam", "sgd-momentum", "adafactor", "muon"),
        *("adamw-8bit", "adamw-cpu-offload", "schedule-free"),
        *("warmup-cosine", "one-cycle", "linear", "warmup-stable-decay", "inverse-sqrt", "reduce-on-plateau"),
        *("ema", "swa", "lr-range-test"),
        *("checkpoint-activations", "checkpoint-selective", "offload-activations", "largest-batch", "fastest-batch"),
        *("watch-memory", "release-cache"),
        *("quantize-int8", "quantize-aware", "prune", "prune-2-4", "prune-channels"),
        *("ddp", "ddp-static", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "sync-batchnorm"),
        *("fsdp2", "fsdp2-offload", "hsdp", "tensor-parallel-2", "pipeline", "hang-watch", "loader-auto"),
        *("cpu", "single-gpu", "multi-gpu", "low-memory"),
    )


@pytest.mark.parametrize("name", names())
def test_a_preset_is_readable_data(name: str) -> None:
    preset = get(name)
    assert preset.kind in ("precision", "compile", "optimize", "memory", "compress", "parallel", "data", "bundle")
    assert 10 < len(preset.summary) < 120
    assert preset.includes == () or preset.kind == "bundle"


@pytest.mark.parametrize("name", names())
def test_a_preset_builds_on_a_machine_that_meets_its_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, FOUR_H100, cpu=CPU)
    kwargs = trainer_kwargs(name)
    assert kwargs
    assert all(isinstance(callback, Callback) for callback in kwargs.get("callbacks", []))
    assert all(isinstance(plugin, Precision) for plugin in kwargs.get("plugins", []))
    yaml.safe_load(yaml.safe_dump({key: value for key, value in kwargs.items() if key not in ("callbacks", "plugins")}))
