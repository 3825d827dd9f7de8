"""What is read from a parsed config, without a parser."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, ModelSummary
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_speedkit.cli.config_entries import (
    Namespace,
    as_namespace,
    class_of,
    entries,
    explicit_settings,
    marks_for,
    split_names,
)
from lightning_speedkit.presets.merge import PRECISION, Setting, expand, merge
from lightning_speedkit.presets.selection import Given
from lightning_speedkit.registry import Part, Preset, Registry, TrainerPatch

_CALLBACKS = "lightning.pytorch.callbacks"


class Outer:
    class Inner(EarlyStopping):
        pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, Namespace()),
        ({"a": {"b": 1}}, Namespace(a=Namespace(b=1))),
        ({"a": {0: 1}}, Namespace(a={0: 1})),
        ({"a": {"no name": 1}}, Namespace(a={"no name": 1})),
        ({"a": [{"b": 1}]}, Namespace(a=[{"b": 1}])),  # the entries of a list stay as they are read
        (None, None),
        ("a", "a"),
    ],
)
def test_a_config_that_was_read_takes_the_form_of_a_parsed_one(value: Any, expected: Any) -> None:
    assert as_namespace(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("a", ["a"]),
        (" a ,, b,a", ["a", "b"]),
        (["b", "a, b"], ["b", "a"]),
        (("a",), ["a"]),
    ],
)
def test_names_are_split_and_kept_once_in_their_order(value: Any, expected: list[str]) -> None:
    assert split_names(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, []), ([], []), ("one", ["one"]), (["one", 2], ["one", 2]), (("one",), ["one"])]
)
def test_callbacks_are_a_list_however_they_are_configured(value: Any, expected: list[Any]) -> None:
    for trainer in ({"callbacks": value}, Namespace(callbacks=value)):
        assert entries(trainer, "callbacks") == expected
    assert entries({}, "callbacks") == []


def test_the_list_is_not_the_configs() -> None:
    callbacks: list[Any] = []
    entries({"callbacks": callbacks}, "callbacks").append("more")
    assert callbacks == []


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (f"{_CALLBACKS}.ModelSummary", ModelSummary),
        ({"class_path": f"{_CALLBACKS}.ModelSummary", "init_args": {"max_depth": 1}}, ModelSummary),
        (Namespace(class_path=f"{_CALLBACKS}.ModelSummary"), ModelSummary),
        (ModelSummary(), ModelSummary),
        (f"{__name__}.Outer.Inner", Outer.Inner),
        ("ModelSummary", None),  # not a path
        ("json", None),  # a module
        ("json.dumps", None),  # a function
        ("json.no_such", None),
        ("no_such_module.Thing", None),
        ("..Thing", None),
        (".", None),
        ("", None),
        ({}, None),
        (Namespace(), None),
    ],
)
def test_the_class_of_an_entry(entry: Any, expected: type | None) -> None:
    assert class_of(entry) is expected


def _settings(patch: TrainerPatch) -> tuple[Setting, ...]:
    return merge(expand(["p"], Registry([Preset(name="p", kind="k", summary="s", patch=patch)])))


def _read(patch: TrainerPatch, defaults: dict[str, Any], given: dict[str, Any]) -> Given:
    """A parser as plain dicts: what is given lies over the defaults, and over the marks in a second parse."""
    trainer = Namespace(**{**defaults, **given})
    marks = marks_for(_settings(patch), trainer)
    assert all(mark != trainer[name] for name, mark in marks.items())  # else a mark could not be told from a value
    return explicit_settings(trainer, Namespace(**{**defaults, **marks, **given}), marks)


_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "num_nodes": 1,
    "precision": None,
    "accumulate_grad_batches": 1,
    "sync_batchnorm": False,
    "max_epochs": None,
    "benchmark": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_epochs", None),
        ("max_epochs", 9),
        ("benchmark", None),
        ("benchmark", False),
        ("precision", None),
        ("precision", "32-true"),
        ("precision", "64-true"),
        ("accumulate_grad_batches", 1),
        ("accumulate_grad_batches", 2),
        ("sync_batchnorm", True),
        ("sync_batchnorm", False),
    ],
)
def test_what_is_given_is_told_from_a_default_of_the_same_value(name: str, value: Any) -> None:
    patch = TrainerPatch(arguments={"max_epochs": 7, "benchmark": True})
    always = {"accelerator": "auto", "strategy": "auto", "num_nodes": 1}  # they count whoever set them
    assert _read(patch, _DEFAULTS, {}).arguments == always
    assert _read(patch, _DEFAULTS, {name: value}).arguments == {**always, name: value}


def test_to_set_what_the_preset_sets_changes_nothing() -> None:
    """It is the default already, so it gets no mark; the preset sets it again to the same."""
    given = _read(TrainerPatch(arguments={"max_epochs": 7}), _DEFAULTS, {"max_epochs": 7})
    assert "max_epochs" not in given.arguments


def test_an_argument_that_this_trainer_does_not_take_has_no_mark() -> None:
    settings = _settings(TrainerPatch(arguments={"max_epochs": 7}, callbacks=(Part(ModelSummary),)))
    assert marks_for(settings, Namespace(devices=1)) == {}


def test_callbacks_and_plugins_count_by_their_class() -> None:
    given = _read(
        TrainerPatch(),
        _DEFAULTS,
        {
            "callbacks": [{"class_path": f"{_CALLBACKS}.ModelSummary"}, EarlyStopping("x"), "no.such.Thing"],
            "plugins": {"class_path": "lightning.pytorch.plugins.DoublePrecision"},
        },
    )
    assert (given.callbacks, given.plugins, given.keys) == (
        (ModelSummary, EarlyStopping),
        (DoublePrecision,),
        frozenset(),
    )


@pytest.mark.parametrize("form", [dict, lambda **entry: as_namespace(entry)])
def test_a_strategy_is_read_with_what_is_inside_it(form: Any) -> None:
    double = form(class_path="lightning.pytorch.plugins.DoublePrecision")
    ddp = form(class_path="lightning.pytorch.strategies.DDPStrategy", init_args={"precision_plugin": double})
    given = _read(TrainerPatch(), _DEFAULTS, {"strategy": ddp})
    assert (given.arguments["strategy"], given.keys) == (DDPStrategy, frozenset({PRECISION}))

    cpu = form(class_path="lightning.pytorch.accelerators.CPUAccelerator")
    path = "lightning.pytorch.strategies.SingleDeviceStrategy"
    single = form(class_path=path, init_args={"accelerator": cpu, "precision_plugin": None})
    given = _read(TrainerPatch(arguments={"accelerator": "gpu"}), _DEFAULTS, {"strategy": single})
    assert (given.arguments["strategy"], given.keys) == (SingleDeviceStrategy, frozenset())
    assert given.arguments["accelerator"] is CPUAccelerator

    plain = _read(TrainerPatch(), _DEFAULTS, {"strategy": form(class_path=path)})
    assert (plain.arguments["strategy"], plain.arguments["accelerator"]) == (SingleDeviceStrategy, "auto")


def test_an_object_in_place_of_a_name_counts_by_its_class() -> None:
    given = _read(TrainerPatch(), _DEFAULTS, {"accelerator": CPUAccelerator(), "strategy": DDPStrategy()})
    assert given.arguments["accelerator"] is CPUAccelerator
    assert given.arguments["strategy"] is DDPStrategy


def test_a_strategy_of_no_known_class_stays_what_was_written() -> None:
    entry = {"class_path": "no.such.Strategy"}
    assert _read(TrainerPatch(), _DEFAULTS, {"strategy": entry}).arguments["strategy"] == entry
