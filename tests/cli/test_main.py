"""The speedkit command: as a real process where exit code and streams matter, else in this one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_speedkit.cli.main import main
from lightning_speedkit.errors import SpeedkitError, UnknownPresetError
from lightning_speedkit.version import __version__

_ROOT = Path(__file__).parents[2]


# The command as a process


def test_a_reader_that_goes_away_is_no_fault() -> None:
    """As in ``speedkit presets | head``, where the reader has gone before the first line, not at some time after."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lightning_speedkit", "presets"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "begins"),
    [
        (["presets", "fp32"], 0, ""),
        (["presets", "bf16-mxed"], 1, "speedkit presets: There is no preset 'bf16-mxed'. Did you mean 'bf16-mixed'"),
    ],
)
def test_the_module_ends_with_the_exit_code(
    words: list[str], code: int, begins: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speedkit", *words])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("lightning_speedkit", run_name="__main__")
    assert raised.value.code == code
    out, err = capsys.readouterr()
    assert err.startswith(begins)
    assert (err.count("\n"), out == "") == (code, code == 1)  # a fault is one line, and nothing beside it


# The same in this process


def test_help_names_every_command_and_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in ((["--help"], ("demo", "presets", "verify")), (["--version"], (__version__,))):
        with pytest.raises(SystemExit) as raised:
            main(words)
        assert raised.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in expected)


_HELP = """
import sys, types
package = types.ModuleType("lightning_speedkit")  # without what the package itself imports
package.__path__ = [sys.argv[1]]
sys.modules["lightning_speedkit"] = package
from lightning_speedkit.cli.main import main
try:
    main(["presets", "--help"])
except SystemExit:
    print(sorted({"torch", "lightning", "numpy", "rich", "jsonargparse"} & set(sys.modules)))
"""


def test_the_command_itself_loads_nothing_heavy_for_help() -> None:
    words = [sys.executable, "-c", _HELP, str(_ROOT / "lightning_speedkit")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prests"], "no command 'prests'. Did you mean 'presets'?"),
        (["--debug", "verfy", "x"], "no command 'verfy'. Did you mean 'verify'?"),
        (["zzz"], "no command 'zzz'. Commands: demo, presets, verify"),
        ([], "required: COMMAND"),
        (["verify"], "required: PATH"),
        (["presets", "--no-such"], "--no-such"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--debug", "presets", "bf16-mxed"], ["presets", "bf16-mxed", "--debug"]])
def test_debug_raises_in_place_of_one_line(words: list[str]) -> None:
    with pytest.raises(UnknownPresetError):
        main(words)


def test_a_fault_that_is_not_the_kits_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", fail)
    with pytest.raises(ZeroDivisionError):
        main(["presets"])


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", stop)
    assert main(["presets"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"
    with pytest.raises(KeyboardInterrupt):
        main(["presets", "--debug"])


def test_every_error_of_the_kit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise SpeedkitError("it is so")

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", fail)
    assert main(["presets"]) == 1
    assert capsys.readouterr().err == "speedkit presets: it is so\n"
