"""The speedkit command: as a real process where exit code and streams matter, else in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_speedkit.cli.main import main
from lightning_speedkit.data import write_lmdb
from lightning_speedkit.errors import SpeedkitError, UnknownPresetError
from lightning_speedkit.presets import names
from lightning_speedkit.version import __version__
from tests.presets.machines import CPU, CPU_BF16, T4, TWO_H100, reader, stand_on

_ROOT = Path(__file__).parents[2]


def _speedkit(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its output going to a pipe."""
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "FORCE_COLOR": "", "COLUMNS": "40"}
    env.pop("FORCE_COLOR")
    return subprocess.run(
        [sys.executable, "-m", "lightning_speedkit", *words], capture_output=True, text=True, check=False, env=env
    )


@pytest.fixture
def store() -> Path:
    return Path(write_lmdb([(i, float(i)) for i in range(100)], "numbers.lmdb"))


@pytest.fixture
def damaged(store: Path) -> Path:
    content = bytearray(store.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path = Path("damaged.lmdb")
    path.write_bytes(content[: len(content) - 4096])
    return path


# The command as a process


def test_a_list_in_a_pipe_is_plain_text_with_one_whole_line_per_preset() -> None:
    done = _speedkit("presets")
    assert (done.returncode, done.stderr) == (0, "")
    assert "".join(done.stdout.splitlines()[1:]).isascii()  # no lines of boxes; the first has the name of the CPU
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(names())
    for name in names():
        assert len([line for line in lines if name in line.split()[:2]]) == 1


def test_a_fault_is_one_line_and_exit_code_1() -> None:
    done = _speedkit("presets", "bf16-mxed")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("speedkit presets: There is no preset 'bf16-mxed'. Did you mean 'bf16-mixed'")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_fault() -> None:
    command = f"{sys.executable} -m lightning_speedkit presets | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)}
    )
    assert done.stderr == ""
    assert done.stdout.startswith("This machine: ")


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


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", lambda: stop(None))
    assert main(["presets"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"


def test_a_fault_that_is_not_the_kits_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", fail)
    with pytest.raises(ZeroDivisionError):
        main(["presets"])


# presets


def _table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: next(line for line in lines if name in line.split()[:2]) for name in names()}


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        (CPU, {"fp16-mixed": "a GPU", "single-gpu": "a GPU", "multi-gpu": "a GPU"}),
        (
            T4,
            {
                "bf16-mixed": "compute capability 8.0 or higher",
                "ddp": "2 devices or more",
                "ddp-static": "2 devices or more",
                "multi-gpu": "2 devices or more",
            },
        ),
        (TWO_H100, {}),
    ],
)
def test_the_list_says_what_can_run_here(
    machine: Any, lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_speedkit.measure.read_hardware", reader(machine, CPU))
    rows = _table(capsys)
    assert {name for name, row in rows.items() if "no: needs" in row} == set(lacking)
    for name, lack in lacking.items():
        assert f"no: needs {lack}" in rows[name]


@pytest.mark.parametrize("name", names())
def test_one_preset_is_explained(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_on(monkeypatch, TWO_H100, cpu=CPU)
    assert main(["presets", name]) == 0
    text = capsys.readouterr().out
    python, _, written = text.partition("In Python:")[2].partition("In the YAML of a SpeedkitCLI:")
    compile(python, "snippet", "exec")
    assert f"trainer_kwargs('{name}')" in python
    assert yaml.safe_load(written) == {"presets": [name]}
    assert "nothing" not in text.partition("sets")[2].splitlines()[0]


def test_several_presets_are_explained_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)
    assert main(["presets", "cpu", "accumulate-4"]) == 0
    text = capsys.readouterr().out
    assert "callback AccumulationScheduler(schedule=4)  (from accumulate-4)" in text
    assert "plugin SpeedkitMixedPrecision(precision='bf16-mixed')  (from precision-auto)" in text
    assert "argument accelerator='cpu'  (from cpu)" in text
    assert main(["presets", "fp32", "bf16-mixed"]) == 1
    assert "'fp32' and 'bf16-mixed' set precision differently" in capsys.readouterr().err


def test_json_is_the_same_for_another_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_on(monkeypatch, CPU, cpu=CPU)
    assert main(["presets", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [fact["names"] for fact in facts] == [[name] for name in names()]
    by_name = {fact["names"][0]: fact for fact in facts}
    assert by_name["accumulate-4"]["sets"] == [
        {
            "place": "callback",
            "name": "AccumulationScheduler",
            "value": by_name["accumulate-4"]["sets"][0]["value"],
            "from": ["accumulate-4"],
        }
    ]
    assert by_name["accumulate-4"]["sets"][0]["value"]["init_args"] == {"schedule": 4}
    assert by_name["multi-gpu"]["runs_here"] is False
    assert by_name["multi-gpu"]["missing"] == ["a GPU"]
    assert by_name["multi-gpu"]["undecided"] == ["precision-auto"]
    assert by_name["cpu"]["sets"][0] == {
        "place": "argument",
        "name": "precision",
        "value": "32-true",
        "from": ["precision-auto"],
    }
    assert main(["presets", "cpu", "accumulate-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["cpu", "accumulate-4"]


# verify


def test_a_sound_store_is_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", store.name]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "numbers.lmdb: every checksum matches"
    values = {" ".join(words[:-1]): words[-1] for words in map(str.split, rows)}
    assert values["samples"] == "100"
    assert values["payload bytes"] == "1,600"  # an int and a float of 8 bytes per sample
    assert values["file bytes"] == f"{store.stat().st_size:,}"


def test_a_damaged_store_is_exit_code_1_with_what_is_wrong(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(damaged)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("speedkit verify: ")
    assert "damaged.lmdb" in err


def test_a_folder_is_every_store_in_it(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("second.lmdb").write_bytes(store.read_bytes())
    assert main(["verify", "."]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "every checksum" in line] == [
        "numbers.lmdb: every checksum matches",
        "second.lmdb: every checksum matches",
    ]
    Path("empty").mkdir()
    assert main(["verify", "empty"]) == 1
    assert "holds no *.lmdb file" in capsys.readouterr().err


def test_every_error_of_the_kit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise SpeedkitError("it is so")

    monkeypatch.setattr("lightning_speedkit.cli.presets._print_list", fail)
    assert main(["presets"]) == 1
    assert capsys.readouterr().err == "speedkit presets: it is so\n"
