"""Every preset of the kit: its lines run, its data is sound, and bundles are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import Precision

from lightning_speedkit.errors import UnknownPresetError
from lightning_speedkit.presets import get, names, trainer_kwargs
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.explain import explain
from lightning_speedkit.presets.merge import expand
from lightning_speedkit.presets.snippet import python_line, python_snippet, yaml_snippet
from tests.presets.machines import CPU, CPU_BF16, TWO_H100, stand_on

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def _needs(name: str) -> set[str]:
    return {need for chosen in expand([name], REGISTRY) for need in chosen.preset.needs}


_FOR_GPU = [name for name in names() if _needs(name) & {"gpu", "cuda"}]
_FOR_ANY = [name for name in names() if name not in _FOR_GPU]


def test_the_catalogue_is_this() -> None:
    assert names() == (
        *("fp32", "bf16-mixed", "fp16-mixed", "precision-auto"),
        *("accumulate-4", "checkpoint-activations", "quantize-int8", "ddp", "ddp-static"),
        *("cpu", "single-gpu", "multi-gpu", "low-memory"),
    )


@pytest.mark.parametrize("name", names())
def test_a_preset_is_readable_data(name: str) -> None:
    preset = get(name)
    assert preset.kind in ("precision", "optimize", "memory", "compress", "parallel", "bundle")
    assert 10 < len(preset.summary) < 120
    assert preset.includes == () or preset.kind == "bundle"


@pytest.mark.parametrize("name", names())
def test_a_preset_builds_on_a_machine_that_meets_its_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, TWO_H100, cpu=CPU)
    kwargs = trainer_kwargs(name)
    assert kwargs
    assert all(isinstance(callback, Callback) for callback in kwargs.get("callbacks", []))
    assert all(isinstance(plugin, Precision) for plugin in kwargs.get("plugins", []))
    yaml.safe_load(yaml.safe_dump({key: value for key, value in kwargs.items() if key not in ("callbacks", "plugins")}))


@pytest.mark.parametrize("name", _FOR_ANY)
def test_the_python_line_makes_a_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)
    scope: dict[str, Any] = {}
    exec(python_snippet([name], {"accelerator": "cpu", "max_epochs": 2, **_QUIET}), scope)
    trainer = scope["trainer"]
    assert isinstance(trainer, Trainer)
    assert trainer.max_epochs == 2
    kwargs = trainer_kwargs(name, accelerator="cpu")
    for callback in kwargs.get("callbacks", []):
        assert [type(one) for one in trainer.callbacks].count(type(callback)) == 1
    for plugin in kwargs.get("plugins", []):
        assert type(trainer.precision_plugin) is type(plugin)


@pytest.mark.parametrize("name", _FOR_GPU)
def test_the_python_line_asks_a_trainer_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, TWO_H100, cpu=CPU)
    asked: dict[str, Any] = {}
    scope = {"Trainer": lambda **kwargs: asked.update(kwargs), "trainer_kwargs": trainer_kwargs}
    exec(python_line([name]), scope)
    assert asked.keys() == trainer_kwargs(name).keys()


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


def test_explain_says_what_is_not_decided_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU, cpu=CPU)
    explanation = explain(["multi-gpu"])
    assert explanation.undecided == ("precision-auto",)
    assert explanation.missing == ("a GPU",)
    stand_on(monkeypatch, TWO_H100, cpu=CPU)
    explanation = explain(["multi-gpu"])
    assert (explanation.undecided, explanation.missing) == ((), ())
    assert {setting.name for setting in explanation.settings} == {
        *("SpeedkitMixedPrecision", "strategy", "accelerator", "devices", "benchmark")
    }


@pytest.mark.parametrize("function", [python_line, python_snippet, yaml_snippet])
def test_a_snippet_refuses_what_cannot_be_written(function: Any) -> None:
    with pytest.raises(UnknownPresetError, match="no-such"):
        function(["no-such"])
    with pytest.raises(TypeError, match="cannot be written down"):
        function(["fp32"], {"logger": object()})
    with pytest.raises(TypeError, match="no argument 'max_epoch'"):
        function(["fp32"], {"max_epoch": 1})


@pytest.mark.parametrize(
    "value", [1, 0.1, 1e-05, "auto", "1e-05", "null", "yes", True, None, [0, 1], {"minutes": 1}, "two\nlines", "it's"]
)
def test_a_value_survives_both_snippets(value: Any) -> None:
    asked: dict[str, Any] = {}
    exec(
        python_line(["fp32"], {"max_time": value}),
        {"Trainer": lambda **kwargs: asked.update(kwargs), "trainer_kwargs": trainer_kwargs},
    )
    assert asked == {"precision": "32-true", "max_time": value}
    assert yaml.safe_load(yaml_snippet(["fp32"], {"max_time": value})) == {
        "presets": ["fp32"],
        "trainer": {"max_time": value},
    }
