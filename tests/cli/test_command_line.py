"""Numbers on a command line, and modules in the current folder."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

import pytest

from lightning_speedkit.cli.command_line import modules_of_this_folder, whole_number


@pytest.mark.parametrize(
    ("least", "most", "text", "told"),
    [
        (1, None, "0", "must be at least 1, got 0"),
        (0, None, "-1", "must be at least 0, got -1"),
        (1, 95, "96", "must be from 1 to 95, got 96"),
        (1, 95, "0", "must be from 1 to 95, got 0"),
        (1, 95, "1.5", "invalid whole number value: '1.5'"),
    ],
)
def test_a_number_out_of_range_is_told(
    least: int, most: int | None, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=whole_number(least, most))
    assert parser.parse_args(["-n", "1"]).n == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["-n", text] if text != "-1" else ["-n=-1"])
    assert told in capsys.readouterr().err


def test_a_module_of_the_folder_is_found_and_the_path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("found_in_this_folder.py").write_text("number = 7")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    before = list(sys.path)
    with modules_of_this_folder():
        assert importlib.import_module("found_in_this_folder").number == 7
    assert sys.path == before
    with contextlib.suppress(KeyError), modules_of_this_folder():
        raise KeyError
    assert sys.path == before
    sys.modules.pop("found_in_this_folder")
