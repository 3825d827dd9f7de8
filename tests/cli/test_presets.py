"""``speedkit presets``: the list, explanations, and the same as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from lightning_speedkit import presets
from lightning_speedkit.cli.main import main
from lightning_speedkit.presets import names
from lightning_speedkit.registry import Preset
from tests.presets.machines import CPU, CPU_BF16, T4, TWO_H100, install_extras, reader, stand_on


def test_a_list_that_is_piped_is_plain_text_with_one_whole_line_per_preset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # of the terminal that the output does not go to
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["presets"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert "".join(lines[1:]).isascii()  # no lines of boxes; the first has the name of the CPU
    assert "\x1b" not in out
    assert len(lines) == 2 + len(names())
    for name in names():
        assert len([line for line in lines if name in line.split()[:2]]) == 1
        assert any(line.endswith(presets.get(name).summary) for line in lines)
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == list(
        dict.fromkeys(presets.get(name).kind for name in names())  # each kind once, above its presets
    )


def _table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: next(line for line in lines if name in line.split()[:2]) for name in names()}


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        (
            CPU,
            {
                **dict.fromkeys(("fp16-mixed", "single-gpu", "multi-gpu"), "a GPU"),
                **dict.fromkeys(("tf32", "fp8", "adamw-cpu-offload", "offload-activations"), "a CUDA device"),
                **dict.fromkeys(("bf16-mixed", "bf16-true"), "a device that computes bfloat16 natively"),
            },
        ),
        (
            T4,
            {
                **dict.fromkeys(("tf32", "bf16-mixed", "bf16-true"), "compute capability 8.0 or higher"),
                "fp8": "compute capability 8.9 or higher",
                **dict.fromkeys(("ddp", "ddp-static", "ddp-fp16", "ddp-bf16", "ddp-powersgd"), "2 devices or more"),
                **dict.fromkeys(("sync-batchnorm", "fsdp2", "fsdp2-offload"), "2 devices or more"),
                **dict.fromkeys(("tensor-parallel-2", "pipeline", "multi-gpu"), "2 devices or more"),
                "hsdp": "4 devices or more",
            },
        ),
        (TWO_H100, {"hsdp": "4 devices or more"}),
    ],
)
def test_the_list_says_what_can_run_here(
    machine: Any, lacking: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_speedkit.measure.read_hardware", reader(machine, CPU))
    install_extras(monkeypatch)
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


def test_what_is_not_used_is_not_told_as_a_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_on(monkeypatch, T4, cpu=CPU)
    presets.register(Preset(name="mine", kind="bundle", summary="s", includes=("bf16-mixed",)))
    assert main(["presets", "mine", "fp16-mixed"]) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  needs"))
    assert told == {"needs": "gpu"}
    assert main(["presets", "mine", "fp16-mixed", "--json"]) == 0
    fact = json.loads(capsys.readouterr().out)
    assert (fact["needs"], fact["missing"], fact["runs_here"]) == (["gpu"], [], True)


def test_what_is_not_decided_and_what_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_on(monkeypatch, CPU, cpu=CPU)
    assert main(["presets", "single-gpu"]) == 0
    out = capsys.readouterr().out
    assert "what precision-auto chooses for that device" in out
    assert "no: needs a GPU" in out
    presets.register(Preset(name="empty", kind="mine", summary="Sets nothing."))
    assert main(["presets", "empty"]) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert (told["needs"], told["sets"]) == ("nothing", "nothing")
