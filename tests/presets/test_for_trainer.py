from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import DoublePrecision, FSDPPrecision, MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from lightning_speedkit import presets
from lightning_speedkit.errors import UnknownPresetError
from lightning_speedkit.memory import ActivationCheckpointing
from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.precision import SpeedkitMixedPrecision
from lightning_speedkit.presets import trainer_kwargs
from lightning_speedkit.registry import Part, Preset, TrainerPatch
from tests.presets.machines import CPU, CPU_BF16, H100, stand_on

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)


def _precision(kwargs: dict[str, Any]) -> str | None:
    """The precision that a Trainer with these arguments has."""
    plugins = [plugin for plugin in kwargs.get("plugins", []) if hasattr(plugin, "precision")]
    return plugins[0].precision if plugins else kwargs.get("precision")


def _classes(kwargs: dict[str, Any], key: str = "callbacks") -> list[type]:
    return [type(one) for one in kwargs.get(key, [])]


# What is set


def test_the_trainer_has_what_the_presets_set() -> None:
    trainer = Trainer(**trainer_kwargs("bf16-mixed", "accumulate-4", accelerator="cpu", max_epochs=3, **_QUIET))
    assert trainer.precision == "bf16-mixed"
    assert type(trainer.precision_plugin) is SpeedkitMixedPrecision
    assert trainer.max_epochs == 3
    assert [callback.schedule for callback in trainer.callbacks if isinstance(callback, AccumulationScheduler)] in (
        [4],
        [{0: 4}],
    )


def test_no_preset_and_no_override_is_no_argument() -> None:
    assert trainer_kwargs() == {}


def test_the_order_of_the_names_changes_nothing() -> None:
    names = ("accumulate-4", "checkpoint-activations", "quantize-int8", "bf16-mixed")
    seen = {tuple(_classes(trainer_kwargs(*order))) for order in itertools.permutations(names)}
    assert len(seen) == 1


def test_every_call_builds_new_objects() -> None:
    one, other = (trainer_kwargs("low-memory", "bf16-mixed") for _ in range(2))
    for key in ("callbacks", "plugins"):
        assert _classes(one, key) == _classes(other, key) != []
        assert not {id(x) for x in one[key]} & {id(x) for x in other[key]}


# Overrides


def test_what_the_caller_gave_is_neither_changed_nor_kept() -> None:
    stop, environment = EarlyStopping("x"), LightningEnvironment()
    given = {"callbacks": [stop], "plugins": [environment], "devices": [0], "callbacks_": None}
    given.pop("callbacks_")
    before = {key: copy.copy(value) for key, value in given.items()}
    kwargs = trainer_kwargs("accumulate-4", "bf16-mixed", **given)
    for key in ("callbacks", "plugins", "devices"):
        kwargs[key].append("more")
    assert given == before
    assert kwargs["callbacks"][1] is stop
    assert kwargs["plugins"][1] is environment


@pytest.mark.parametrize("callbacks", [ModelSummary(), [ModelSummary()], (ModelSummary(),), None, []])
def test_override_callbacks_come_after_those_of_the_presets(callbacks: Any) -> None:
    own = [ModelSummary] if callbacks else []
    assert _classes(trainer_kwargs("accumulate-4", callbacks=callbacks)) == [AccumulationScheduler, *own]


class _MyScheduler(AccumulationScheduler):
    pass


@pytest.mark.parametrize("callback", [AccumulationScheduler(2), _MyScheduler(2), GradientAccumulationScheduler({0: 2})])
def test_an_override_callback_that_does_the_same_takes_the_place_of_the_presets(callback: Any) -> None:
    kwargs = trainer_kwargs("accumulate-4", "checkpoint-activations", callbacks=[callback])
    assert _classes(kwargs) == [ActivationCheckpointing, type(callback)]
    assert kwargs["callbacks"][1] is callback


@pytest.mark.parametrize("factor", [1, 8])
def test_an_override_factor_takes_the_place_of_the_accumulation_callback(factor: int) -> None:
    assert trainer_kwargs("accumulate-4", accumulate_grad_batches=factor) == {"accumulate_grad_batches": factor}


def test_an_override_wins_also_where_it_is_the_trainers_default() -> None:
    assert trainer_kwargs("cpu", accelerator="auto", devices="auto", precision=None) == {
        "accelerator": "auto",
        "devices": "auto",
        "precision": None,
    }
    assert trainer_kwargs("ddp", strategy="auto") == {"strategy": "auto"}


@pytest.mark.parametrize("precision", [None, "32-true", "64-true", "bf16-mixed", 16])
@pytest.mark.parametrize("preset", ["bf16-mixed", "fp32", "precision-auto", "cpu"])
def test_an_override_precision_drops_the_presets(preset: str, precision: Any) -> None:
    kwargs = trainer_kwargs(preset, precision=precision)
    assert kwargs["precision"] == precision
    assert "plugins" not in kwargs


@pytest.mark.parametrize("preset", ["bf16-mixed", "fp32", "precision-auto", "cpu"])
@pytest.mark.parametrize("as_list", [True, False])
def test_an_override_precision_plugin_drops_the_presets(preset: str, as_list: bool) -> None:
    plugin = DoublePrecision()
    kwargs = trainer_kwargs(preset, plugins=[plugin] if as_list else plugin)
    assert kwargs["plugins"] == [plugin]
    assert "precision" not in kwargs
    assert Trainer(**kwargs | _QUIET | {"accelerator": "cpu"}).precision_plugin is plugin


def test_another_kind_of_plugin_stands_beside_the_presets() -> None:
    environment = LightningEnvironment()
    kwargs = trainer_kwargs("bf16-mixed", plugins=environment)
    assert _classes(kwargs, "plugins") == [SpeedkitMixedPrecision, LightningEnvironment]


@pytest.mark.parametrize(("wrong", "right"), [("max_epoch", "max_epochs"), ("callback", "callbacks")])
def test_an_unknown_override_is_named_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{wrong}'. Did you mean '{right}'"):
        trainer_kwargs("fp32", **{wrong: 1})
    with pytest.raises(TypeError, match="'self'"):
        trainer_kwargs("fp32", **{"self": 1})


def test_names_are_strings_one_by_one() -> None:
    with pytest.raises(TypeError, match=r"one by one.*trainer_kwargs\(\*names\)"):
        trainer_kwargs(["fp32"])  # type: ignore[arg-type]


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownPresetError, match=r"'bf16-mxed'. Did you mean 'bf16-mixed'"):
        trainer_kwargs("bf16-mxed")


# Strategies and accelerators that are objects


@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")),
        FSDPStrategy(precision_plugin=FSDPPrecision("bf16-true")),
    ],
)
@pytest.mark.parametrize("preset", ["bf16-mixed", "fp32"])
def test_a_strategy_that_carries_a_precision_plugin_keeps_it(strategy: Any, preset: str) -> None:
    assert trainer_kwargs(preset, strategy=strategy) == {"strategy": strategy}


def test_a_strategy_that_carries_an_accelerator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, H100, cpu=CPU)
    strategy = SingleDeviceStrategy("cpu", accelerator=CPUAccelerator())
    kwargs = trainer_kwargs("single-gpu", strategy=strategy)
    assert "accelerator" not in kwargs
    assert _precision(kwargs) == "32-true"
    trainer = Trainer(**kwargs | _QUIET)
    assert isinstance(trainer.accelerator, CPUAccelerator)


@pytest.mark.parametrize("accelerator", ["cpu", CPUAccelerator()])
@pytest.mark.parametrize("how", ["preset", "argument"])
def test_an_accelerator_object_gives_the_autocast_of_its_name(accelerator: Any, how: str) -> None:
    names, extra = (("bf16-mixed",), {}) if how == "preset" else ((), {"precision": "bf16-mixed"})
    kwargs = trainer_kwargs(*names, accelerator=accelerator, fast_dev_run=True, **extra, **_QUIET)
    trainer = Trainer(**kwargs)
    trainer.fit(BoringModel())
    assert trainer.precision_plugin.device == "cpu"


# Presets of one's own


def test_a_preset_of_ones_own_is_selected_like_any_other() -> None:
    mine = Preset(
        name="short", kind="mine", summary="s", includes=("fp32",), patch=TrainerPatch(arguments={"max_epochs": 2})
    )
    presets.register(mine)
    presets.register(mine)
    assert presets.get("short") is mine
    assert presets.names()[-1] == "short"
    assert trainer_kwargs("short") == {"precision": "32-true", "max_epochs": 2}
    with pytest.raises(ValueError, match="exists already"):
        presets.register(Preset(name="short", kind="mine", summary="t"))
    presets.register(Preset(name="short", kind="mine", summary="t"), override=True)
    assert trainer_kwargs("short") == {}


@pytest.mark.parametrize("name", ["no_such_argument", "callbacks", "plugins"])
def test_a_preset_that_sets_what_the_trainer_does_not_take_is_named(name: str) -> None:
    presets.register(Preset(name="odd", kind="mine", summary="s", patch=TrainerPatch(arguments={name: []})))
    with pytest.raises(TypeError, match=f"'odd' set '{name}'"):
        trainer_kwargs("odd")


def test_the_data_of_a_preset_is_not_handed_out() -> None:
    presets.register(Preset(name="two", kind="mine", summary="s", patch=TrainerPatch(arguments={"devices": [0, 1]})))
    trainer_kwargs("two")["devices"].append(2)
    assert trainer_kwargs("two") == {"devices": [0, 1]}


def test_a_registered_callback_is_built_from_its_arguments() -> None:
    part = Part(ModelSummary, {"max_depth": 3})
    presets.register(Preset(name="deep", kind="mine", summary="s", patch=TrainerPatch(callbacks=(part,))))
    (callback,) = trainer_kwargs("deep")["callbacks"]
    assert callback._max_depth == 3


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("clip-norm", {"gradient_clip_val": 0.5}),
        ("clip-zclip", {"gradient_clip_val": None}),
        ("ema", {"callbacks": [EMAWeightAveraging()]}),
        ("swa", {"callbacks": [StochasticWeightAveraging(0.1)]}),
    ],
)
def test_what_a_callback_would_refuse_beside_itself_takes_its_place(name: str, own: dict[str, Any]) -> None:
    assert trainer_kwargs(name, **own) == own
