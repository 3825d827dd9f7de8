"""The speedkit command: as a real process where exit code and streams matter, else in this one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_rich_that_finds_no_reader_is_no_fault() -> None:
    """rich ends the process with exit code 1 then, as a console of the demo does."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _process("x", writing, "utf-8", prints="__import__('rich.console').console.Console().print")
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", lambda: sys.exit(3))
    with pytest.raises(SystemExit) as raised:
        main(["presets"])
    assert raised.value.code == 3


_PRINTS = """
import sys, types
package = types.ModuleType("lightning_speedkit")  # without what the package itself imports
package.__path__ = [sys.argv[1]]
sys.modules["lightning_speedkit"] = package
import lightning_speedkit.cli.presets
from lightning_speedkit.cli.main import main
lightning_speedkit.cli.presets._print_list = lambda: {prints}({text!r})
sys.exit(main(["presets"]))
"""


def _process(text: str, stdout: Any, encoding: str, *, prints: str = "print") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", _PRINTS.format(text=text, prints=prints), str(_ROOT / "lightning_speedkit")],
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONIOENCODING": encoding},
    )


def test_a_stream_in_ascii_shows_escapes() -> None:
    done = _process("größe \udc80 μ", subprocess.PIPE, "ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, rb"gr\xf6\xdfe \udc80 \u03bc" + b"\n", b"")


@pytest.mark.parametrize("size", [1, 100_000])  # found when the stream is flushed at the end, or before
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(size: int, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("wb") as full:
        done = _process("x" * size, full, "utf-8")
    assert done.returncode == 1
    assert done.stderr == b"speedkit presets: No space left on device: not all of it was written.\n"


# The same in this process


def test_the_stream_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout.errors
    seen = []
    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", lambda: seen.append(sys.stdout.errors))
    assert main(["presets"]) == 0
    assert (seen, sys.stdout.errors) == (["backslashreplace"], before)


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
        (["bench", "x"], "no command 'bench'. Did you mean 'speedkit data bench'?"),
        (["pack", "photographs"], "required: OUT (for example: speedkit pack photographs/ data/"),
        (["zzz"], "no command 'zzz'. Commands: demo, presets, pack, verify, data"),
        ([], "speedkit: error: a command is missing: demo, presets, pack, verify, data"),
        (["data"], "speedkit data: error: a command is missing: bench."),
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
    for error in (ZeroDivisionError, PermissionError):  # also one of the system, as long as the output works

        def fail(error: type[Exception] = error) -> None:
            raise error

        monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", fail)
        with pytest.raises(error):
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


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (
            ["pack", "a", "b", "--splt", "0.5,0.5"],
            "speedkit pack: error: unrecognized arguments: --splt 0.5,0.5 (did",
        ),
        (["data", "bench", "x", "--batchsize=3"], "(did you mean --batch-size?)"),
        (["data", "bench", "x", "--batchsize=3"], "usage: speedkit data bench [-h]"),
        (["demo", "--quik"], "usage: speedkit demo [-h] [--out DIR]"),
        (["demo", "--quik"], "(did you mean --quick?)"),
        (["--degub", "demo"], "(did you mean --debug?)"),
        (["verify", "x", "--zzzzzz"], "unrecognized arguments: --zzzzzz\n"),
    ],
)
def test_a_misspelt_option_ends_with_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert near in capsys.readouterr().err
