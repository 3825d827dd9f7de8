"""The check on a GPU, without one: how it deals with cases that fail, and every case with tiny sizes on the CPU."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import gpu_check
from benchmarks.gpu_cases.case_process import CaseProcess
from benchmarks.gpu_cases.case_run import CaseRun, call_case, missing_need
from benchmarks.gpu_cases.registry import CASES, Case
from benchmarks.gpu_check import main, run_check
from tests.benchmarks.conftest import ForkServer

_HERE = "tests.benchmarks.test_gpu_check"


def fine(run: CaseRun) -> None:
    run.number("answer ms", 42)
    run.check("it holds", True)


def wrong(run: CaseRun) -> None:
    run.check("two is three", 2 == 3, "2 and 3")


def raises(run: CaseRun) -> None:
    run.number("before ms", 1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def dies(run: CaseRun) -> None:
    run.number("before ms", 2)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(run: CaseRun) -> None:
    run.number("before ms", 3)
    if os.fork() == 0:
        time.sleep(600)
    Path(os.environ["PIDS"]).write_text(str(os.getpgid(0)))
    time.sleep(600)


def interrupts(run: CaseRun) -> None:
    raise KeyboardInterrupt


def case(name: str, seconds: float = 10.0, needs: tuple[str, ...] = ()) -> Case:
    return Case(name, "test", f"{_HERE}:{name}", seconds, needs)


@pytest.fixture
def quick_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_FACTS", case("fine"))  # spares the import of torch


def checked(cases: list[Case], folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    console = Console(file=io.StringIO(), width=200)
    settings = {"device": "cpu", "warm": False, **settings}
    content = run_check(cases, results=folder, console=console, **settings)
    assert json.loads((folder / "gpu_check.json").read_text()) == content
    assert [path.name for path in folder.iterdir()] == ["gpu_check.json"]
    return {row["name"]: row for row in content["cases"]}


@pytest.mark.usefixtures("quick_facts")
def test_a_case_that_fails_in_any_way_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # the next process starts while a case runs
    processes: list[CaseProcess] = []
    monkeypatch.setattr(gpu_check, "CaseProcess", lambda warm: processes.append(CaseProcess(warm)) or processes[-1])
    cases = [case("raises"), case("dies"), case("hangs", 2.0), case("wrong"), case("fine")]
    cases += [Case("absent", "test", f"{_HERE}:no_such_function"), case("fine", needs=("no_such_module",))]
    cases[-1] = Case("unmet", "test", f"{_HERE}:fine", needs=("no_such_module",))
    rows = checked(cases, tmp_path / "results", budget=60.0)
    assert {name: row["status"] for name, row in rows.items()} == {
        "raises": "error",
        "dies": "error",
        "hangs": "error",
        "wrong": "wrong",
        "fine": "ok",
        "absent": "error",
        "unmet": "needs no_such_module",
    }
    assert "illegal memory access" in rows["raises"]["error"]
    assert "exit code -11" in rows["dies"]["error"]
    assert "killed" in rows["hangs"]["error"]
    # what they had told before that is kept
    assert [rows[name]["numbers"] for name in ("raises", "dies", "hangs")] == [{"before ms": n} for n in (1, 2, 3)]
    assert rows["wrong"]["checks"] == [{"name": "two is three", "ok": False, "reason": "2 and 3"}]
    assert rows["fine"]["numbers"] == {"answer ms": 42}
    assert len(processes) == 8  # for the device, six cases, and the one that was ready when nothing was left to run
    assert all(process._process.returncode is not None for process in processes)
    group = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(group) == []  # neither the process that hung nor its child is left


def _alive(group: int) -> list[str]:
    """The processes of a group that run; one that has ended may wait for the system to collect it."""
    told = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            told.append(path.parent.name)
    return told


@pytest.mark.usefixtures("quick_facts")
def test_cases_beyond_the_budget_are_not_run(tmp_path: Path) -> None:
    rows = checked([case("fine", 1.0), case("wrong", 100.0)], tmp_path, budget=20.0)
    assert (rows["fine"]["status"], rows["wrong"]["status"]) == ("ok", "not run")


def test_a_run_that_is_ended_keeps_the_cases_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_FACTS", case("fine"))
    with pytest.raises(KeyboardInterrupt):
        checked([case("fine"), case("interrupts"), case("wrong")], tmp_path, in_process=True)
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["status"] for row in content["cases"]] == ["ok", "not run", "not run"]
    assert content["cases"][0]["numbers"] == {"answer ms": 42}


def test_nothing_is_measured_on_a_device_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_FACTS", case("raises"))
    console = Console(file=io.StringIO())
    content = run_check([case("fine")], device="cpu", results=tmp_path, console=console, in_process=True)
    assert [row["status"] for row in content["cases"]] == ["not run"]
    assert [*tmp_path.iterdir()] == []


def test_time_that_is_not_taken_is_shared_by_those_after() -> None:
    one, two = case("fine", 10.0), case("wrong", 30.0)
    assert gpu_check._limit(one, [two], 100.0) == 25.0
    assert gpu_check._limit(two, [], 99.0) == 99.0
    assert gpu_check._limit(one, [two], 12.0) == 10.0  # first come, first served where there is too little
    assert gpu_check._limit(two, [], 2.0) == 2.0


def test_a_process_that_is_never_given_a_case_ends_with_close() -> None:
    process = CaseProcess(warm=False)
    process.close()
    assert process._process.returncode is not None


def test_a_number_must_be_finite() -> None:
    told = call_case("json:dumps", (), CaseRun(1.0, "cpu", True))  # not a case: it raises
    assert told["status"] == "error"
    run = CaseRun(1.0, "cpu", True)
    run.number("time ms", math.nan)
    assert run.numbers == {}
    assert run.checks == [{"name": "time ms", "ok": False, "reason": "it is nan"}]


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        ((), None),
        (("cuda",), "cuda"),
        (("capability>=8.9",), "cuda"),
        (("json",), None),
        (("json", "no_such"), "no_such"),
        (("no_such or json",), None),
        (("no_such or neither",), "no_such or neither"),
    ],
)
def test_needs_on_a_cpu(needs: tuple[str, ...], missing: str | None) -> None:
    assert missing_need(needs, "cpu") == missing


def test_only_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "no such case"])
    assert "'no such case' is no part of a case" in capsys.readouterr().err
    assert main(["--list", "--only", "optimizers", "compress"]) == 0
    listed = capsys.readouterr().out
    assert "adamw-8bit" not in listed
    assert "QuantizeOnFitEnd" in listed


def test_names_of_cases_are_unique() -> None:
    assert len({each.name for each in CASES}) == len(CASES)


def test_all_cases_fit_into_the_budget_together() -> None:
    assert sum(each.seconds for each in CASES) <= 300


@pytest.mark.slow
def test_every_case_runs_with_tiny_sizes_or_says_what_it_needs(tmp_path: Path, fork_server: ForkServer) -> None:
    arguments = ["--tiny", "--results", str(tmp_path)]
    told = fork_server.run("script", {"module": "benchmarks.gpu_check", "arguments": arguments}, timeout=250)
    assert told.get("metrics") == {"done": 1}, told
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["name"] for row in content["cases"]] == [each.name for each in CASES]
    assert content["hardware"]["accelerator"] == "cpu"
    assert content["versions"]["torch"]
    for row, each in zip(content["cases"], CASES, strict=True):
        missing = missing_need(each.needs, "cpu")
        assert row["status"] == ("ok" if missing is None else f"needs {missing}"), row
        assert missing is not None or row["numbers"] or row["checks"], row
