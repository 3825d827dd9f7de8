"""Presets as data: building, describing, finding and adding them."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest

import lightning_speedkit
from lightning_speedkit.errors import UnknownPresetError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.registry import Part, Preset, Registry, TrainerPatch


class _Holder:
    def __init__(self, values: list[int]) -> None:
        self.values = values


def test_two_builds_share_nothing_with_each_other_or_the_part() -> None:
    part = Part(_Holder, {"values": [1]})
    one, other = part.build(), part.build()
    one.values.append(2)
    assert other.values == [1]
    assert part.arguments == {"values": [1]}
    part.config()["init_args"]["values"].append(3)
    assert part.build().values == [1]


def test_class_path_is_the_shortest_that_imports() -> None:
    assert Part(Fraction).class_path() == "fractions.Fraction"
    assert Part(_Holder).class_path() == "tests.test_registry._Holder"
    assert Part(lightning_speedkit.AccumulationScheduler).class_path() == "lightning_speedkit.AccumulationScheduler"


def test_a_part_and_a_preset_travel_to_another_process() -> None:
    preset = Preset(name="x", kind="k", summary="s", patch=TrainerPatch(callbacks=(Part(Fraction, {"numerator": 3}),)))
    again = pickle.loads(pickle.dumps(preset))
    assert again == preset
    assert again.patch.callbacks[0].build() == 3


def test_a_patch_may_depend_on_the_hardware() -> None:
    preset = Preset(
        name="x", kind="k", summary="s", patch=lambda h: TrainerPatch(arguments={"devices": h.device_count})
    )
    eight = Hardware(accelerator="cuda", device_name="a GPU", device_count=8)
    assert preset.patch_for(eight).arguments == {"devices": 8}


@pytest.mark.parametrize(
    ("asked", "near"), [("bf16-mxed", "'bf16-mixed'"), ("BF16-mixed", "'bf16-mixed'"), ("ddp_static", "'ddp-static'")]
)
def test_a_miss_suggests_the_nearest(asked: str, near: str) -> None:
    registry = Registry(Preset(name=n, kind="k", summary="s") for n in ("bf16-mixed", "fp16-mixed", "ddp-static"))
    with pytest.raises(UnknownPresetError, match=f"Did you mean {near}"):
        registry.get(asked)


@pytest.mark.parametrize("asked", ["", "zzz", 3, None, ["bf16-mixed"]])
def test_a_miss_with_nothing_near_lists_what_there_is(asked: object) -> None:
    with pytest.raises(UnknownPresetError, match=r"There is no preset .* Known: fp32\."):
        Registry([Preset(name="fp32", kind="k", summary="s")]).get(asked)  # type: ignore[arg-type]


def test_a_name_is_taken_once() -> None:
    first = Preset(name="x", kind="k", summary="the first")
    registry = Registry([first])
    registry.register(first)
    second = Preset(name="x", kind="k", summary="the second")
    with pytest.raises(ValueError, match=r"'x' exists already \(the first\).*override=True"):
        registry.register(second)
    assert registry.get("x") is first
    registry.register(second, override=True)
    assert registry.get("x") is second
    with pytest.raises(TypeError, match="takes a Preset, got str"):
        registry.register("x")  # type: ignore[arg-type]
    assert "x" in registry
    assert "y" not in registry
    assert [p.name for p in registry] == ["x"]
