"""Every callback, plugin and DataModule can be written in LightningCLI YAML and comes back as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit import SpeedkitCLI
from lightning_speedkit.registry import Part
from tests.conformance.cases import CALLBACKS, PLUGINS

PARTS = [part for case in CALLBACKS for part in (case.working, case.neutral)]


def _from_yaml(key: str, part: Part, folder: Path) -> Any:
    path = folder / "config.yaml"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    path.write_text(yaml.safe_dump({"trainer": {**quiet, key: [part.config()]}}))
    return SpeedkitCLI(BoringModel, run=False, save_config_callback=None, args=["--config", str(path)])


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.cls.__name__}-{part.arguments}")
def test_callback_round_trip(part: Part, tmp_path: Path) -> None:
    cli = _from_yaml("callbacks", part, tmp_path)
    (built,) = [c for c in cli.trainer.callbacks if isinstance(c, part.cls)]
    assert _plain(built) == _plain(part.build())


@pytest.mark.parametrize("part", PLUGINS, ids=lambda part: f"{part.cls.__name__}-{part.arguments}")
def test_plugin_round_trip(part: Part, tmp_path: Path) -> None:
    cli = _from_yaml("plugins", part, tmp_path)
    assert type(cli.trainer.precision_plugin) is part.cls
    assert cli.trainer.precision_plugin.precision == part.build().precision


def _plain(thing: object) -> dict[str, Any]:
    """The attributes that are plain values: what the constructor was told."""
    plain = (bool, int, float, str, list, dict, tuple, type(None))
    return {name: value for name, value in vars(thing).items() if isinstance(value, plain)}
