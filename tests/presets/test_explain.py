"""What a selection would set here, and what this machine lacks for it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit import presets
from lightning_speedkit.errors import HardwareNeedError, PresetConflictError, UnknownPresetError
from lightning_speedkit.presets.explain import explain
from lightning_speedkit.registry import Preset, TrainerPatch
from tests.presets.machines import CPU, CPU_BF16, T4, TWO_H100, stand_on


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


@pytest.mark.parametrize("names", [["fp32"], ["cpu", "accumulate-4"], ["low-memory"], ["bf16-mixed"]])
def test_what_is_explained_is_what_is_set(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is trainer_kwargs, which really sets it."""
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)
    kwargs = presets.trainer_kwargs(*names)
    built = {place: [type(one).__name__ for one in kwargs.pop(place, [])] for place in ("callbacks", "plugins")}
    explanation = explain(names)
    told = {
        "callbacks": [setting.name for setting in explanation.settings if setting.place == "callback"],
        "plugins": [setting.name for setting in explanation.settings if setting.place == "plugin"],
    }
    assert told == built
    assert {s.name: s.value for s in explanation.settings if s.place == "argument"} == kwargs
    assert (explanation.missing, explanation.undecided) == ((), ())


def test_each_setting_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU, cpu=CPU)
    explanation = explain(["cpu", "fp32"])
    origins = {setting.name: [origin.preset.name for origin in setting.origins] for setting in explanation.settings}
    assert origins == {"precision": ["fp32"], "accelerator": ["cpu"], "devices": ["cpu"]}  # not from precision-auto
    assert [one.preset.name for one in explanation.presets] == ["fp32", "precision-auto", "cpu"]


@pytest.mark.parametrize("machine", [CPU, T4, TWO_H100])
@pytest.mark.parametrize("name", presets.names())
def test_missing_is_empty_exactly_where_it_would_run(name: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, machine, cpu=CPU)
    missing = explain([name]).missing
    if missing:
        with pytest.raises(HardwareNeedError) as raised:
            presets.trainer_kwargs(name)
        assert missing[0] in str(raised.value)
    else:
        presets.trainer_kwargs(name)


def test_what_is_not_used_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, T4, cpu=CPU)
    presets.register(Preset(name="mine", kind="bundle", summary="s", includes=("bf16-mixed",)))
    assert explain(["mine"]).missing == ("compute capability 8.0 or higher",)
    together = explain(["mine", "fp16-mixed"])
    assert (together.needs, together.missing) == (("gpu",), ())


def test_the_machines_of_a_preset_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, T4, cpu=CPU)
    patch = TrainerPatch(arguments={"num_nodes": 2})
    presets.register(Preset(name="cluster", kind="bundle", summary="s", includes=("ddp",), patch=patch))
    assert explain(["ddp"]).missing == ("2 devices or more",)
    assert explain(["cluster"]).missing == ()


def test_a_wrong_selection_is_an_error_here_too() -> None:
    with pytest.raises(UnknownPresetError, match="Did you mean 'fp32'"):
        explain(["fp23"])
    with pytest.raises(PresetConflictError, match="'fp32' and 'bf16-mixed'"):
        explain(["fp32", "bf16-mixed"])
