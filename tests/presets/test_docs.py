"""The page on presets: its Python runs, its YAML is read, its table is the catalogue."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit.cli import SpeedkitCLI
from lightning_speedkit.presets import names
from tests.presets.machines import CPU, CPU_BF16, H100, stand_on

_PAGE = (Path(__file__).parents[2] / "docs" / "presets.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("machine", [CPU, H100])
def test_the_python_runs_on_a_machine_with_and_without_a_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, machine, cpu=CPU)
    scope: dict[str, Any] = {}
    assert len(_blocks("python")) >= 7
    for block in _blocks("python"):
        exec(block, scope)


def test_the_yaml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)
    (block,) = _blocks("yaml")
    Path("run.yaml").write_text(block)
    cli = SpeedkitCLI(
        BoringModel, run=False, args=["--config", "run.yaml", "--trainer.accelerator=cpu"], save_config_callback=None
    )
    assert cli.trainer.max_epochs == 3
    assert cli.trainer.precision == "bf16-mixed"


def test_the_table_names_every_preset_once() -> None:
    rows = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`(.*?)`", " ".join(rows))) == sorted(names())
