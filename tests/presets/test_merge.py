"""The merge rules, against a model of them that is written without the code's own structures."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelSummary
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision

from lightning_speedkit.errors import PresetConflictError, UnknownPresetError
from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.presets.merge import as_patch, expand, merge
from lightning_speedkit.registry import Part, Preset, Registry, TrainerPatch
from tests.presets.machines import CPU, H100

_NAMES = ("a", "b", "c", "d")
_THINGS = ("max_epochs", "devices", "benchmark")


def _preset(name: str, includes: tuple[str, ...] = (), **arguments: Any) -> Preset:
    return Preset(name=name, kind="k", summary="s", includes=includes, patch=TrainerPatch(arguments=arguments))


def _merged(registry: Registry, *names: str) -> dict[str, Any]:
    return dict(as_patch(merge(expand(names, registry))).arguments)


@st.composite
def _registries(draw: st.DrawFn) -> Registry:
    """Four presets that set some of three arguments, and a bundle that includes some of them."""
    few = st.dictionaries(st.sampled_from(_THINGS), st.integers(0, 1))
    presets = [_preset(name, **draw(few)) for name in _NAMES]
    included = tuple(draw(st.lists(st.sampled_from(_NAMES), unique=True)))
    return Registry([*presets, _preset("bundle", included, **draw(few))])


def _expected(registry: Registry, names: list[str]) -> dict[str, Any] | None:
    """The rules of the module docstring, thing by thing; None for a conflict."""
    near = set(names)
    far = {inner for name in near for inner in registry.get(name).includes} - near
    result = {}
    for thing in _THINGS:
        for layer in (near, far):
            values = {
                registry.get(name).patch.arguments[thing]
                for name in layer
                if thing in registry.get(name).patch.arguments
            }
            if len(values) > 1:
                return None
            if values:
                result[thing] = values.pop()
                break
    return result


@settings(max_examples=150, deadline=None)
@given(_registries(), st.lists(st.sampled_from((*_NAMES, "bundle")), min_size=1), st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_give_what_the_rules_say(registry, names, random) -> None:
    shuffled = [*names, random.choice(names)]
    random.shuffle(shuffled)
    expected = _expected(registry, names)
    for selection in (names, shuffled):
        if expected is None:
            with pytest.raises(PresetConflictError):
                _merged(registry, *selection)
        else:
            assert _merged(registry, *selection) == expected
    if expected is not None:  # what was merged, as one preset, changes nothing when it is merged again
        again = Registry([*registry, _preset("merged", **expected)])
        assert _merged(again, "merged", *names) == expected
        ordered = merge(expand(names, registry)), merge(expand(shuffled, registry))
        assert as_patch(ordered[0]) == as_patch(ordered[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TrainerPatch(arguments={"devices": 1}), TrainerPatch(arguments={"devices": 2})),
        (TrainerPatch(arguments={"devices": 1}), TrainerPatch(arguments={"devices": True})),
        (TrainerPatch(arguments={"precision": None}), TrainerPatch(arguments={"precision": "32-true"})),
        (
            TrainerPatch(callbacks=(Part(ModelSummary, {"max_depth": 1}),)),
            TrainerPatch(callbacks=(Part(ModelSummary, {"max_depth": 2}),)),
        ),
        (
            TrainerPatch(plugins=(Part(MixedPrecision, {"precision": "bf16-mixed", "device": "cpu"}),)),
            TrainerPatch(plugins=(Part(DoublePrecision),)),
        ),
        (
            TrainerPatch(plugins=(Part(MixedPrecision, {"precision": "bf16-mixed", "device": "cpu"}),)),
            TrainerPatch(arguments={"precision": "bf16-mixed"}),
        ),
        (
            TrainerPatch(callbacks=(Part(AccumulationScheduler, {"schedule": 4}),)),
            TrainerPatch(arguments={"accumulate_grad_batches": 4}),
        ),
        (
            TrainerPatch(callbacks=(Part(AccumulationScheduler, {"schedule": 4}),)),
            TrainerPatch(callbacks=(Part(GradientAccumulationScheduler, {"scheduling": {0: 4}}),)),
        ),
    ],
)
def test_one_thing_set_in_two_ways_names_both_presets_and_both_values(one, other) -> None:
    registry = Registry(
        [
            Preset(name="left", kind="k", summary="s", patch=one),
            Preset(name="right", kind="k", summary="s", patch=other),
        ]
    )
    with pytest.raises(PresetConflictError) as raised:
        merge(expand(["right", "left"], registry))
    for setting in (*merge(expand(["left"], registry)), *merge(expand(["right"], registry))):
        assert setting.describe() in str(raised.value)
    assert "'left'" in str(raised.value)
    assert "'right'" in str(raised.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TrainerPatch(arguments={"gradient_clip_val": 1}), TrainerPatch(arguments={"gradient_clip_val": 1.0})),
        (TrainerPatch(arguments={"devices": [0, 1]}), TrainerPatch(arguments={"devices": (0, 1)})),
        (TrainerPatch(arguments={"precision": "bf16"}), TrainerPatch(arguments={"precision": "bf16-mixed"})),
        (TrainerPatch(arguments={"precision": 32}), TrainerPatch(arguments={"precision": "32-true"})),
        (
            TrainerPatch(callbacks=(Part(ModelSummary, {"max_depth": 2}),)),
            TrainerPatch(callbacks=(Part(ModelSummary, {"max_depth": 2}),)),
        ),
    ],
)
def test_equal_values_are_one_setting_of_both(one, other) -> None:
    registry = Registry(
        [
            Preset(name="left", kind="k", summary="s", patch=one),
            Preset(name="right", kind="k", summary="s", patch=other),
        ]
    )
    (setting,) = merge(expand(["right", "left"], registry))
    assert [origin.preset.name for origin in setting.origins] == ["left", "right"]


def test_different_callbacks_and_kinds_of_plugins_stand_side_by_side() -> None:
    registry = Registry(
        [
            Preset(name="summary", kind="k", summary="s", patch=TrainerPatch(callbacks=(Part(ModelSummary),))),
            Preset(
                name="stop",
                kind="k",
                summary="s",
                patch=TrainerPatch(callbacks=(Part(EarlyStopping, {"monitor": "x"}),)),
            ),
            Preset(name="plain", kind="k", summary="s", patch=TrainerPatch(plugins=(Part(Precision),))),
        ]
    )
    patch = as_patch(merge(expand(["plain", "stop", "summary"], registry)))
    assert [part.cls for part in patch.callbacks] == [ModelSummary, EarlyStopping]
    assert [part.cls for part in patch.plugins] == [Precision]


@pytest.mark.parametrize("other", [Part(EarlyStopping, {"monitor": "b"}), Part(EarlyStopping, {"monitor": "a"})])
def test_one_preset_that_sets_a_thing_twice_is_a_conflict_with_itself(other: Part) -> None:
    patch = TrainerPatch(callbacks=(Part(EarlyStopping, {"monitor": "a"}), other))
    preset = Preset(name="mine", kind="k", summary="s", patch=patch)
    with pytest.raises(
        PresetConflictError, match=r"^The preset 'mine' sets callbacks \(EarlyStopping\) twice: Early"
    ) as caught:
        merge(expand(["mine"], Registry([preset])))
    assert "once" in str(caught.value)


def test_a_value_that_cannot_be_compared_is_a_conflict_and_not_a_crash() -> None:
    class Strange:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    registry = Registry([_preset("left", devices=Strange()), _preset("right", devices=Fraction(1))])
    with pytest.raises(PresetConflictError, match="devices"):
        _merged(registry, "left", "right")


def test_a_nested_bundle_gives_way_to_the_outer_one() -> None:
    registry = Registry(
        [
            _preset("leaf", max_epochs=1, devices=1, benchmark=1),
            _preset("inner", ("leaf",), devices=2, benchmark=2),
            _preset("outer", ("inner",), benchmark=3),
        ]
    )
    assert _merged(registry, "outer") == {"max_epochs": 1, "devices": 2, "benchmark": 3}
    with pytest.raises(PresetConflictError, match="benchmark"):  # both named: nobody is nearer
        _merged(registry, "outer", "leaf")
    with pytest.raises(PresetConflictError, match="'inner' sets benchmark=2"):
        _merged(registry, "inner", "outer")


def test_presets_that_include_each_other_are_refused() -> None:
    registry = Registry([_preset("egg", ("hen",)), _preset("hen", ("egg",))])
    with pytest.raises(ValueError, match="egg -> hen -> egg"):
        expand(["egg"], registry)


def test_an_unknown_name_inside_a_bundle_is_found() -> None:
    with pytest.raises(UnknownPresetError, match="'gone'"):
        expand(["outer"], Registry([_preset("outer", ("gone",))]))


def test_what_depends_on_the_hardware_is_left_out_until_it_is_known() -> None:
    def choose(hardware):
        return TrainerPatch(arguments={"devices": 8 if hardware.accelerator == "cuda" else 1})

    registry = Registry([Preset(name="auto", kind="k", summary="s", patch=choose), _preset("fixed", max_epochs=2)])
    chosen = expand(["auto", "fixed"], registry)
    assert as_patch(merge(chosen)).arguments == {"max_epochs": 2}
    assert as_patch(merge(chosen, H100)).arguments == {"devices": 8, "max_epochs": 2}
    assert as_patch(merge(chosen, CPU)).arguments == {"devices": 1, "max_epochs": 2}


@pytest.mark.parametrize("names", [("cuts", "average"), ("average", "cuts"), ("bundle", "cuts")])
def test_presets_that_cannot_run_together_are_a_conflict_with_its_reason(names: tuple[str, ...]) -> None:
    registry = Registry(
        [
            Preset(
                name="cuts", kind="test", summary="cuts", not_beside={"average": "it keeps copies; use a second fit"}
            ),
            _preset("average", max_epochs=1),
            _preset("bundle", includes=("average",)),
        ]
    )
    with pytest.raises(
        PresetConflictError, match=r"cannot be used in one run: it keeps copies; use a second fit\."
    ) as error:
        _merged(registry, *names)
    assert {"'cuts'", "'average'"} <= set(str(error.value).split())
    assert _merged(registry, "average") == {"max_epochs": 1}
