"""Presets against a machine and against what the user has set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import EarlyStopping, ModelSummary
from lightning.pytorch.plugins import DoublePrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lightning_speedkit import presets
from lightning_speedkit.errors import HardwareNeedError, MissingExtraError, PresetConflictError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.precision import SpeedkitMixedPrecision
from lightning_speedkit.presets import needs, trainer_kwargs
from lightning_speedkit.presets.merge import PRECISION, expand, merge
from lightning_speedkit.presets.selection import (
    Given,
    accelerator_of,
    can_run,
    hardware_for,
    needs_left,
    nodes_of,
    settle,
    trainer_argument_names,
)
from lightning_speedkit.registry import Part, Preset, Registry, TrainerPatch
from tests.presets.machines import CPU, CPU_BF16, H100, T4, TWO_H100, stand_on


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)


def _conflicts_on(machine: Any, monkeypatch: pytest.MonkeyPatch) -> set[frozenset[str]]:
    stand_on(monkeypatch, machine, cpu=CPU)
    found = set()
    for one, other in itertools.combinations(presets.names(), 2):
        try:
            trainer_kwargs(one, other)
        except PresetConflictError as error:
            found.add(frozenset(name for name in (one, other) if f"'{name}'" in str(error)))
        except HardwareNeedError:
            pass
    return found


_SPREAD = (
    *("ddp", "ddp-static", "ddp-fp16", "ddp-bf16", "ddp-powersgd"),
    *("fsdp2", "fsdp2-offload", "hsdp", "tensor-parallel-2", "pipeline"),
)
_ON_ANY_MACHINE = {
    frozenset(pair)
    for pair in (
        *((full, low) for full in ("fp32", "tf32") for low in ("bf16-mixed", "bf16-true", "fp16-mixed", "fp8")),
        *itertools.combinations(("bf16-mixed", "bf16-true", "fp16-mixed", "fp8"), 2),
        ("compile", "compile-blocks"),
        *itertools.combinations(("checkpoint-activations", "checkpoint-selective", "offload-activations"), 2),
        ("largest-batch", "fastest-batch"),
        *itertools.combinations(_SPREAD, 2),
        ("cpu", "single-gpu"),
        ("cpu", "multi-gpu"),
        ("single-gpu", "multi-gpu"),
        ("clip-norm", "clip-zclip"),
        ("guard-spikes", "guard-rollback"),
        ("ema", "swa"),
        ("prune", "prune-2-4"),
        *(
            ("prune-channels", other)
            for other in (
                *("compile", "compile-blocks", "ema", "swa", "guard-non-finite", "guard-spikes", "guard-rollback"),
                *("prune", "prune-2-4", "quantize-aware"),
            )
        ),
        *itertools.combinations(("accumulate-4", "accumulate-labels-4", "batch-256"), 2),
        ("auto-micro-batch", "auto-micro-batch-labels"),
        *itertools.combinations(
            (
                *("adamw", "adam", "sgd-momentum", "adafactor", "muon"),
                *("adamw-8bit", "adamw-cpu-offload", "schedule-free"),
            ),
            2,
        ),
        *itertools.combinations(
            ("warmup-cosine", "one-cycle", "linear", "warmup-stable-decay", "inverse-sqrt", "reduce-on-plateau"), 2
        ),
    )
}


@pytest.mark.parametrize(
    ("machine", "auto_conflicts"),
    [
        (CPU, ("bf16-mixed", "bf16-true", "fp16-mixed", "fp8")),
        (CPU_BF16, ("fp32", "tf32", "bf16-true", "fp16-mixed", "fp8")),
        (T4, ("fp32", "tf32", "bf16-mixed", "bf16-true", "fp8")),
        (TWO_H100, ("fp32", "tf32", "bf16-true", "fp16-mixed", "fp8")),
    ],
)
def test_the_matrix_of_all_pairs(machine: Any, auto_conflicts: tuple[str, ...], monkeypatch: Any) -> None:
    expected = _ON_ANY_MACHINE | {frozenset(("precision-auto", other)) for other in auto_conflicts}
    assert _conflicts_on(machine, monkeypatch) == expected


@pytest.mark.parametrize(
    ("name", "machine", "lacks", "instead"),
    [
        ("fp16-mixed", CPU, "a GPU", "'precision-auto'"),
        ("bf16-mixed", T4, "compute capability 8.0 or higher", "'fp16-mixed'"),
        ("ddp", H100, "2 devices or more", "Leave it out here"),
        ("single-gpu", CPU, "a GPU", "'cpu'"),
        ("multi-gpu", CPU, "a GPU", "'cpu'"),
        ("multi-gpu", H100, "2 devices or more", "'single-gpu'"),
    ],
)
def test_a_lack_says_what_is_needed_what_is_here_and_what_to_use(
    name: str, machine: Any, lacks: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_on(monkeypatch, machine)
    with pytest.raises(HardwareNeedError) as raised:
        trainer_kwargs(name)
    for part in (f"'{name}'", lacks, machine.device_name, instead):
        assert part in str(raised.value)


def test_to_repeat_what_a_preset_sets_lifts_no_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HardwareNeedError, match="'single-gpu' needs a GPU"):
        trainer_kwargs("single-gpu", accelerator="gpu")
    stand_on(monkeypatch, H100)
    assert trainer_kwargs("single-gpu", accelerator="gpu")["accelerator"] == "gpu"


def test_two_machines_have_the_devices_that_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, H100)
    assert trainer_kwargs("ddp", num_nodes=2)["strategy"] == "speedkit_ddp"


def test_fp16_is_refused_on_the_cpu_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, H100)
    with pytest.raises(HardwareNeedError, match="'fp16-mixed' needs a GPU; this machine has a CPU"):
        trainer_kwargs("fp16-mixed", accelerator="cpu")


def test_what_is_not_used_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, T4)
    assert trainer_kwargs("bf16-mixed", precision="32-true") == {"precision": "32-true"}


@pytest.mark.parametrize("accelerator", ["cuda", "tpu", "no-such"])
def test_an_accelerator_that_is_not_here_is_named(accelerator: str) -> None:
    with pytest.raises(HardwareNeedError, match=f"accelerator='{accelerator}'.*a CPU with AMX"):
        trainer_kwargs("precision-auto", accelerator=accelerator)
    assert trainer_kwargs("accumulate-4", accelerator=accelerator)["accelerator"] == accelerator


def test_auto_is_a_device_that_lightning_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, Hardware(accelerator="xpu", device_name="Max 1550", native_bf16=True), cpu=CPU)
    assert trainer_kwargs("precision-auto") == {"precision": "32-true"}


@pytest.mark.parametrize(
    "strategy", ["fsdp", "FSDP_cpu_offload", "deepspeed_stage_2", FSDPStrategy(), ModelParallelStrategy()]
)
def test_a_strategy_that_makes_its_own_precision_gets_the_name(strategy: Any) -> None:
    kwargs = trainer_kwargs("bf16-mixed", strategy=strategy)
    assert kwargs["precision"] == "bf16-mixed"
    assert "plugins" not in kwargs


@pytest.mark.parametrize("strategy", ["auto", "ddp", "speedkit_ddp", DDPStrategy(), SingleDeviceStrategy()])
def test_other_strategies_get_the_plugin(strategy: Any) -> None:
    kwargs = trainer_kwargs("bf16-mixed", strategy=strategy)
    assert [type(plugin) for plugin in kwargs["plugins"]] == [SpeedkitMixedPrecision]
    assert "precision" not in kwargs


def test_a_preset_strategy_counts_as_well() -> None:
    presets.register(
        Preset(name="sharded", kind="mine", summary="s", patch=TrainerPatch(arguments={"strategy": "fsdp"}))
    )
    assert trainer_kwargs("sharded", "bf16-mixed") == {"strategy": "fsdp", "precision": "bf16-mixed"}


# What is used of a preset, and what it then needs


def test_what_a_nearer_preset_takes_over_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 is named, so the bf16 that the bundle includes is not used: a T4 need not have it."""
    stand_on(monkeypatch, T4)
    presets.register(Preset(name="mine", kind="bundle", summary="s", includes=("bf16-mixed",)))
    (plugin,) = trainer_kwargs("mine", "fp16-mixed")["plugins"]
    assert plugin.precision == "16-mixed"
    with pytest.raises(HardwareNeedError, match=r"'bf16-mixed' \(of 'mine'\) needs compute capability 8.0"):
        trainer_kwargs("mine")


def test_a_preset_that_sets_nothing_by_itself_keeps_its_needs() -> None:
    presets.register(Preset(name="mine", kind="bundle", summary="s", includes=("accumulate-4",), needs=("gpu",)))
    with pytest.raises(HardwareNeedError, match="'mine' needs a GPU"):
        trainer_kwargs("mine")


def test_the_machines_of_a_preset_count_like_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, H100)
    patch = TrainerPatch(arguments={"num_nodes": 2})
    presets.register(Preset(name="cluster", kind="bundle", summary="s", includes=("ddp",), patch=patch))
    assert trainer_kwargs("cluster") == {"strategy": "speedkit_ddp", "num_nodes": 2}
    with pytest.raises(HardwareNeedError, match="2 devices"):
        trainer_kwargs("cluster", num_nodes=1)


def test_where_only_a_library_is_missing_it_is_not_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wanted in (("library", ("extra:quant",)), ("both", ("gpu", "extra:quant"))):
        patch = TrainerPatch(arguments={"max_epochs": 1})
        presets.register(Preset(name=name, kind="k", summary="s", patch=patch, needs=wanted))
    monkeypatch.setattr(needs, "_missing_libraries", lambda extra: ["torchao", "onnx"])
    with pytest.raises(MissingExtraError) as caught:
        trainer_kwargs("library")
    assert str(caught.value) == (
        "The preset 'library' needs torchao and onnx, which are not installed: pip install 'lightning-speedkit[quant]'"
    )
    with pytest.raises(
        HardwareNeedError, match=r"'both' needs a GPU and torchao, onnx \(pip install '.*; this machine"
    ):
        trainer_kwargs("both")
    monkeypatch.setattr(needs, "_is_known", lambda extra: False)
    with pytest.raises(MissingExtraError, match=r"the extra 'quant' of lightning-speedkit, .*: pip install -U '"):
        trainer_kwargs("library")


def test_a_part_that_a_bundle_replaces_needs_nothing() -> None:
    bundle = Preset(
        name="mine",
        kind="bundle",
        summary="s",
        includes=("fp16-mixed",),
        patch=TrainerPatch(arguments={"precision": "32-true"}),
    )
    presets.register(bundle)
    assert can_run(bundle, CPU) == ()
    assert trainer_kwargs("mine") == {"precision": "32-true"}


def test_a_bundle_that_contradicts_itself_is_told_when_it_is_used() -> None:
    bundle = Preset(name="mine", kind="bundle", summary="s", includes=("fp16-mixed", "fp32"))
    presets.register(bundle)
    assert can_run(bundle, CPU) == ("a GPU",)
    with pytest.raises(PresetConflictError):
        trainer_kwargs("mine")


def test_the_needs_of_a_part_that_is_used_on_another_device_are_only_the_libraries() -> None:
    patch = TrainerPatch(arguments={"accelerator": "gpu", "benchmark": True})
    preset = Preset(name="mine", kind="k", summary="s", patch=patch, needs=("gpu", "extra:quant"))
    chosen = expand(["mine"], Registry([preset]))
    settings = merge(chosen)
    left = {
        "nothing given": needs_left(chosen[0], settings, Given(), CPU),
        "another device": needs_left(chosen[0], settings, Given(arguments={"accelerator": "cpu"}), CPU),
        "the same device": needs_left(chosen[0], settings, Given(arguments={"accelerator": "gpu"}), CPU),
        "all of it": needs_left(chosen[0], settings, Given(arguments={"accelerator": "gpu", "benchmark": None}), CPU),
    }
    assert left == {
        "nothing given": ("gpu", "extra:quant"),
        "another device": ("extra:quant",),
        "the same device": ("gpu", "extra:quant"),
        "all of it": (),
    }


def test_a_preset_that_chooses_nothing_on_this_machine_keeps_its_needs() -> None:
    preset = Preset(name="mine", kind="k", summary="s", patch=lambda hardware: TrainerPatch(), needs=("gpu",))
    (one,) = expand(["mine"], Registry([preset]))
    for hardware in (CPU, None):
        assert needs_left(one, (), Given(), hardware) == ("gpu",)


# The pieces by themselves


class _MyStop(EarlyStopping):
    pass


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        (Given(), set()),
        (Given(arguments={"max_epochs": None}), {"max_epochs"}),
        (Given(arguments={"precision": None}), {"DoublePrecision"}),
        (Given(plugins=(Precision,)), {"DoublePrecision"}),
        (Given(keys=frozenset({PRECISION})), {"DoublePrecision"}),
        (Given(callbacks=(EarlyStopping,)), {"EarlyStopping"}),
        (Given(callbacks=(_MyStop,)), {"EarlyStopping"}),  # a subclass does the same
        (Given(callbacks=(ModelSummary,)), set()),
        (Given(callbacks=(AccumulationScheduler,)), {"accumulate_grad_batches"}),
    ],
)
def test_what_a_user_gives_replaces_what_is_about_the_same(given: Given, replaced: set[str]) -> None:
    patch = TrainerPatch(
        arguments={"max_epochs": 3, "accumulate_grad_batches": 4},
        callbacks=(Part(EarlyStopping, {"monitor": "x"}),),
        plugins=(Part(DoublePrecision),),
    )
    settings = merge(expand(["p"], Registry([Preset(name="p", kind="k", summary="s", patch=patch)])))
    assert {setting.name for setting in settings if given.replaces(setting)} == replaced


@pytest.mark.parametrize(
    ("of_the_preset", "given", "expected"),
    [
        ({}, {}, "auto"),
        ({"accelerator": "gpu"}, {}, "gpu"),
        ({"accelerator": "gpu"}, {"accelerator": "CPU"}, "cpu"),
        ({"accelerator": "gpu"}, {"accelerator": None}, "auto"),
        ({}, {"accelerator": CPUAccelerator()}, "cpu"),
        ({}, {"accelerator": CUDAAccelerator}, "cuda"),
    ],
)
def test_the_accelerator_is_the_users_then_the_presets(
    of_the_preset: dict[str, Any], given: dict[str, Any], expected: str
) -> None:
    preset = Preset(name="p", kind="k", summary="s", patch=TrainerPatch(arguments=of_the_preset))
    assert accelerator_of(merge(expand(["p"], Registry([preset]))), Given(arguments=given)) == expected


@pytest.mark.parametrize(
    ("of_the_preset", "given", "expected"),
    [({}, {}, 1), ({"num_nodes": 3}, {}, 3), ({"num_nodes": 3}, {"num_nodes": 2}, 2), ({}, {"num_nodes": 2}, 2)],
)
def test_the_number_of_machines_is_the_users_then_the_presets(
    of_the_preset: dict[str, Any], given: dict[str, Any], expected: int
) -> None:
    preset = Preset(name="p", kind="k", summary="s", patch=TrainerPatch(arguments=of_the_preset))
    assert nodes_of(merge(expand(["p"], Registry([preset]))), Given(arguments=given)) == expected


def test_the_machine_is_read_for_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, T4, cpu=CPU)
    assert [hardware_for(name) for name in ("cuda", "gpu", "cpu", "tpu")] == [T4, T4, CPU, None]


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        (
            CPU,
            {
                **dict.fromkeys(("tf32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp8"), 1),
                **dict.fromkeys(("adamw-cpu-offload", "offload-activations", "single-gpu", "multi-gpu"), 1),
            },
        ),
        (H100, dict.fromkeys((*_SPREAD, "sync-batchnorm", "multi-gpu"), 1)),
        (
            T4,
            dict.fromkeys(("tf32", "bf16-mixed", "bf16-true", "fp8", *_SPREAD, "sync-batchnorm", "multi-gpu"), 1),
        ),
        (TWO_H100, {"hsdp": 1}),
    ],
)
def test_what_can_run_on_each_machine(machine: Hardware, lacking: dict[str, int]) -> None:
    told = {name: can_run(presets.get(name), machine) for name in presets.names()}
    assert {name: len(missing) for name, missing in told.items() if missing} == lacking


def test_a_preset_lacks_what_the_presets_in_it_lack() -> None:
    outer = Preset(name="outer", kind="bundle", summary="s", includes=("fp16-mixed",))
    presets.register(outer)
    assert can_run(outer, CPU) == ("a GPU",)


def test_settling_builds_nothing() -> None:
    class Never:
        def __init__(self) -> None:
            raise AssertionError("built")

    patch = TrainerPatch(callbacks=(Part(Never),), plugins=(Part(Never),))
    presets.register(Preset(name="mine", kind="k", summary="s", patch=patch))
    assert settle(["mine"], Given()) == patch


def test_the_arguments_are_the_trainers() -> None:
    known = trainer_argument_names()
    assert {"accelerator", "callbacks", "precision", "max_epochs"} <= set(known)
    assert "self" not in known
