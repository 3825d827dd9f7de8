"""What is printed to be pasted: the Python runs, the YAML is read, and both say the same."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit.cli import SpeedkitCLI
from lightning_speedkit.errors import UnknownPresetError
from lightning_speedkit.presets import names, trainer_kwargs
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.merge import expand
from lightning_speedkit.presets.snippet import python_line, python_snippet, yaml_snippet
from tests.presets.machines import CPU, CPU_BF16, TWO_H100, stand_on

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def _needs(name: str) -> set[str]:
    return {need for chosen in expand([name], REGISTRY) for need in chosen.preset.needs}


_FOR_GPU = [name for name in names() if _needs(name) & {"gpu", "cuda"}]


_FOR_ANY = [name for name in names() if name not in _FOR_GPU]


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


class _Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        float("nan"),
        float("inf"),
        1j,
        b"text",
        {1, 2},
        _Number.ONE,
        numpy.float64(0.5),
        numpy.arange(2),
        [1, [object()]],
        {"minutes": float("nan")},
        {b"minutes": 1},
        ...,
        int,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("function", [python_line, python_snippet, yaml_snippet])
def test_what_is_no_plain_value_is_refused_by_each_alike(function: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)^devices=.* cannot be written down"):
        function(["fp32"], {"devices": value})


@pytest.mark.parametrize("text", ["1e3", "1e-05", "-1E+5", "12", "1.5", "007", "1_000", "on", "12:30", "true", "runs"])
def test_a_text_that_looks_like_something_else_stays_one_for_the_program_that_reads_the_yaml(text: str) -> None:
    """jsonargparse reads ``1e3`` as a number, which PyYAML takes for a text."""
    arguments = {"default_root_dir": text, "accelerator": "cpu", **_QUIET}
    Path("run.yaml").write_text(yaml_snippet(["fp32"], arguments))
    cli = SpeedkitCLI(
        BoringModel,
        run=False,
        args=["--config", "run.yaml"],
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert cli.config.trainer.default_root_dir == text
    assert cli.config.presets == ["fp32"]


def test_the_snippet_is_the_line_with_what_it_needs() -> None:
    assert python_snippet(["fp32", "ddp"], {"devices": [0, 1]}) == (
        "from lightning.pytorch import Trainer\n"
        "from lightning_speedkit import trainer_kwargs\n"
        "trainer = Trainer(**trainer_kwargs('fp32', 'ddp', devices=[0, 1]))"
    )
    assert yaml_snippet(["fp32", "ddp"], {"devices": (0, 1)}) == (
        "presets:\n- fp32\n- ddp\ntrainer:\n  devices:\n  - 0\n  - 1"
    )


def test_no_preset_is_a_selection_too() -> None:
    assert python_line([]) == "trainer = Trainer(**trainer_kwargs())"
    assert yaml_snippet([]) == "presets: []"


def test_the_order_is_the_callers() -> None:
    given = {"max_epochs": 2, "devices": 1, "accelerator": "cpu"}
    assert re.findall(r"(\w+)=", python_line(["fp32"], given)) == list(given)
    assert list(yaml.safe_load(yaml_snippet(["fp32"], given))["trainer"]) == list(given)
