"""The harness with functions whose outcome is known: order, pairing, failures, hangs, and what is written."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pytest
from rich.console import Console

from benchmarks.harness import Variant, run_benchmark
from benchmarks.worker import ROOT, without_paths


def tiny(name: str, function: str, /, baseline: str | None = None, **arguments: Any) -> Variant:
    return Variant(name, f"tests.benchmarks.tiny:{function}", arguments, baseline)


def run(tmp_path: Path, variants: list[Variant], **settings: Any) -> dict[str, Any]:
    quiet = Console(file=io.StringIO())
    return run_benchmark("test", variants, **{"results": tmp_path, "console": quiet, "in_process": True, **settings})


class Apart(Protocol):
    """:func:`run` with processes, fresh or forked."""

    def __call__(self, variants: list[Variant], **settings: Any) -> dict[str, Any]: ...


@pytest.fixture(params=["fresh", "forked"])
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> Apart:
    def fresh(variants: list[Variant], **settings: Any) -> dict[str, Any]:
        return run(tmp_path, variants, in_process=False, **settings)

    def forked(variants: list[Variant], **settings: Any) -> dict[str, Any]:
        server = request.getfixturevalue("fork_server")
        asked = {"variants": [asdict(variant) for variant in variants], "settings": settings}
        told = server.run("harness", {**asked, "results": str(tmp_path)}, timeout=100)
        assert told.get("metrics") == {"forkable": 1}, told
        content: dict[str, Any] = json.loads((tmp_path / "test.json").read_text())
        assert content["settings"]["forked"]
        return content

    return fresh if request.param == "fresh" else forked


def gone(pid: int) -> bool:
    """Whether the process has ended; one that is only not reaped yet has."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_the_order_alternates_after_the_warmup(tmp_path: Path) -> None:
    log = tmp_path / "log"
    variants = [tiny(name, "known", value=1.0, log=str(log), name=name) for name in "abc"]
    content = run(tmp_path, variants, warmup=1, rounds=3)
    assert log.read_text().split() == list("cbaabccbaabc")
    assert [told["order"] for told in content["rounds"]] == [list("abc"), list("cba"), list("abc")]
    assert [told["order"] for told in content["warmup"]] == [list("cba")]


def test_ratios_are_paired_by_round_and_above_one_is_a_gain(tmp_path: Path) -> None:
    variants = [
        tiny("base", "by_round", values=[99.0, 2.0, 8.0, 3.0], counter=str(tmp_path / "base")),
        tiny("new", "by_round", values=[1.0, 1.0, 2.0, 6.0], counter=str(tmp_path / "new")),
    ]
    summary = run(tmp_path, variants, baseline="base", warmup=1, rounds=3)["summary"]
    ratio = summary["new"]["ratios"]["seconds"]  # of 2/1, 8/2 and 3/6; the ratio of the medians would be 3/2
    assert (ratio["n"], ratio["min"], ratio["median"], ratio["max"]) == (3, 0.5, 2.0, 4.0)
    assert (ratio["q1"], ratio["q3"]) == (1.25, 3.0)
    assert ratio["clear"]
    assert summary["base"]["metrics"]["seconds"]["median"] == 3.0  # without the 99 of the warm-up
    assert summary["base"]["ratios"] == {}


def test_where_more_is_better_the_ratio_turns(tmp_path: Path) -> None:
    variants = [tiny("base", "known", value=4.0), tiny("new", "known", value=2.0)]
    ratios = run(tmp_path, variants, baseline="base", higher_is_better=["rate"])["summary"]["new"]["ratios"]
    assert (ratios["seconds"]["median"], ratios["rate"]["median"]) == (2.0, 2.0)


@pytest.mark.parametrize(("values", "clear"), [([1.0, 0.5, 2.0], False), ([2.0, 2.0, 2.5], True), ([2.0, 2.0], False)])
def test_a_spread_around_one_or_too_few_rounds_are_unclear(tmp_path: Path, values: list[float], clear: bool) -> None:
    variants = [
        tiny("base", "known", value=1.0),
        tiny("new", "by_round", values=values, counter=str(tmp_path / "new")),
    ]
    content = run(tmp_path, variants, baseline="base", warmup=0, rounds=len(values))
    assert content["summary"]["new"]["ratios"]["seconds"]["clear"] is clear


def test_a_variant_may_have_its_own_baseline(tmp_path: Path) -> None:
    variants = [
        tiny("a", "known", value=8.0),
        tiny("b", "known", value=4.0),
        tiny("c", "known", value=2.0, baseline="b"),
    ]
    summary = run(tmp_path, variants, baseline="a")["summary"]
    assert [summary[name]["ratios"].get("seconds", {}).get("median") for name in "abc"] == [None, 2.0, 2.0]


def test_each_run_is_its_own_process_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: Apart
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    variants = [tiny("a", "process"), tiny("b", "process")]
    content = apart(variants, warmup=0, rounds=2)
    runs = [told["runs"][name]["metrics"] for told in content["rounds"] for name in "ab"]
    assert len({metrics["pid"] for metrics in runs} | {os.getpid()}) == 5
    assert [metrics["calls"] for metrics in runs] == [1.0] * 4
    assert [metrics["threads"] for metrics in runs] == [1.0] * 4
    assert [metrics["leads"] for metrics in runs] == [1.0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.json"]
    chosen = apart(variants[:1], rounds=1, warmup=0, environment={"OMP_NUM_THREADS": "2"})
    assert chosen["rounds"][0]["runs"]["a"]["metrics"]["threads"] == 2.0
    assert chosen["environment"] == {"OMP_NUM_THREADS": "2"}


def test_a_fork_has_what_is_imported_and_torchs_threads_as_asked(apart: Apart, request: pytest.FixtureRequest) -> None:
    variants = [tiny("a", "torch_threads")]
    content = apart(variants, warmup=0, rounds=1, environment={"OMP_NUM_THREADS": "2"})
    forked = "forked" in request.node.name
    assert content["rounds"][0]["runs"]["a"]["metrics"] == {
        "imported": float(forked),
        "threads": 2.0 if forked else 0.0,
    }


@pytest.mark.parametrize("in_process", [True, False])
def test_a_module_that_is_not_there_costs_no_process(tmp_path: Path, in_process: bool) -> None:
    variants = [
        Variant("without", "no.such:function", requires="no_such_module"),
        Variant("with", "tests.benchmarks.tiny:known", {"value": 2.0}, requires="json"),
    ]
    summary = run(tmp_path, variants, in_process=in_process, warmup=0, rounds=1)["summary"]
    assert summary["without"]["errors"] == ["no_such_module is not installed"]
    assert summary["with"]["metrics"]["seconds"]["median"] == 2.0


def test_a_failing_variant_is_recorded_and_the_others_go_on_in_process(tmp_path: Path) -> None:
    check_failing(run(tmp_path, FAILING, baseline="good", warmup=0, rounds=3))


def test_a_failing_variant_is_recorded_and_the_others_go_on(apart: Apart) -> None:
    check_failing(apart(FAILING, baseline="good", warmup=0, rounds=3))


FAILING = [tiny("bad", "failing"), tiny("good", "known", value=2.0)]


def check_failing(content: dict[str, Any]) -> None:
    bad, good = content["summary"]["bad"], content["summary"]["good"]
    assert bad["errors"] == ["ValueError: boom <b>", "not run: it failed 2 times in a row"]
    assert (bad["metrics"], bad["ratios"]) == ({}, {})
    assert good["metrics"]["seconds"]["n"] == 3


def test_a_failing_baseline_leaves_the_others_without_ratio(tmp_path: Path) -> None:
    variants = [tiny("bad", "failing"), tiny("good", "known", value=2.0)]
    summary = run(tmp_path, variants, baseline="bad")["summary"]
    assert summary["good"]["ratios"] == {}
    assert summary["good"]["metrics"]["seconds"]["median"] == 2.0


def test_a_single_failure_costs_its_round_only(tmp_path: Path) -> None:
    variants = [tiny("base", "known", value=2.0), tiny("new", "failing_at", calls=[1], counter=str(tmp_path / "new"))]
    summary = run(tmp_path, variants, baseline="base", warmup=0, rounds=4)["summary"]
    assert summary["new"]["errors"] == ["ValueError: call 1"]
    assert summary["new"]["ratios"]["seconds"]["n"] == 3


def test_a_crash_is_told_with_the_last_words(apart: Apart) -> None:
    content = apart([tiny("bad", "crashing"), tiny("exit", "exiting", code=3)], warmup=0, rounds=1)
    assert content["summary"]["bad"]["errors"] == ["the process ended with exit code -9\nlast words"]
    assert content["summary"]["exit"]["errors"] == ["the process ended with exit code 3\nlast words"]


def test_a_hanging_variant_is_killed_with_all_its_processes(tmp_path: Path, apart: Apart) -> None:
    pids = tmp_path / "pids"
    variants = [tiny("bad", "hanging", pids=str(pids)), tiny("good", "known", value=2.0)]
    # long enough to start Python, also on a busy machine
    content = apart(variants, warmup=0, rounds=1, timeout=6.0)
    assert content["summary"]["bad"]["errors"] == ["not done within 6 s: killed"]
    assert content["summary"]["good"]["metrics"]["seconds"]["median"] == 2.0
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_a_variant_leaves_running_is_ended(tmp_path: Path, apart: Apart) -> None:
    pids = tmp_path / "pids"
    content = apart([tiny("a", "leaving_a_child", pids=str(pids))], warmup=0, rounds=1)
    assert content["summary"]["a"]["errors"] == []
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        content = run(tmp_path, [tiny("a", "process")], in_process=False, forked=True, warmup=0, rounds=1)
    finally:
        stop.set()
        thread.join()
    assert content["rounds"][0]["runs"]["a"]["metrics"]["imported"] == 0  # a fresh one


@pytest.mark.parametrize("kind", ["none", "empty", "text", "nan"])
def test_anything_but_finite_numbers_is_an_error(tmp_path: Path, kind: str) -> None:
    content = run(tmp_path, [tiny("bad", "wrong", kind=kind)], warmup=0, rounds=1)
    (error,) = content["summary"]["bad"]["errors"]
    assert "tests.benchmarks.tiny:wrong" in error


def test_the_file_says_where_and_how(tmp_path: Path) -> None:
    content = run(tmp_path, [tiny("a", "known", value=2.0)], warmup=1, rounds=2)
    written = json.loads((tmp_path / "test.json").read_text())
    assert written == content
    assert (written["schema"], written["schema_version"], written["name"]) == ("benchmark", 1, "test")
    assert set(written["versions"]) == {"python", "torch", "lightning", "lightning_speedkit", "os"}
    assert written["hardware"]["cpu_count"] >= 1
    assert written["command"].startswith("python ")
    assert written["variants"][0]["arguments"] == {"value": 2.0}
    assert len(written["warmup"]) == 1
    assert [told["runs"]["a"]["metrics"]["seconds"] for told in written["rounds"]] == [2.0, 2.0]


def test_paths_of_this_machine_stay_here(tmp_path: Path) -> None:
    text = without_paths(f"File {ROOT}/benchmarks/x.py, {Path.home()}/data")
    assert text == "File benchmarks/x.py, ~/data"


def test_the_table_shows_losses_and_errors_as_they_are(tmp_path: Path) -> None:
    stream = io.StringIO()
    variants = [tiny("base", "known", value=1.0), tiny("worse", "known", value=4.0), tiny("[red]bad", "failing")]
    run(tmp_path, variants, baseline="base", rounds=3, console=Console(file=stream, width=200))
    shown = stream.getvalue()
    assert "0.250×" in shown
    assert "[red]bad: ValueError: boom <b>" in shown


def test_its_own_name_as_baseline_compares_with_nothing(tmp_path: Path) -> None:
    variants = [tiny("a", "known", value=8.0), tiny("b", "known", "b", value=4.0)]
    summary = run(tmp_path, variants, baseline="a")["summary"]
    assert (summary["b"]["ratios"], summary["b"]["baseline"]) == ({}, None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"baseline": "x"}, "not one of the variants"),
        ({"rounds": 0}, "rounds=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"timeout": 0.0, "in_process": False}, "timeout=0.0"),
        ({"timeout": 5.0}, "cannot apply timeout"),
        ({"environment": {}}, "cannot apply timeout or environment"),
        ({"forked": True}, "cannot .* fork"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run(tmp_path, [tiny("a", "known", value=1.0)], **settings)
    assert list(tmp_path.iterdir()) == []


def test_names_must_differ_and_be_plain(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each once"):
        run(tmp_path, [tiny("a", "known", value=1.0), tiny("a", "known", value=2.0)])
    with pytest.raises(ValueError, match="plain word"):
        run_benchmark("../x", [tiny("a", "known", value=1.0)], results=tmp_path)
