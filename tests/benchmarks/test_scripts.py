"""Every benchmark script runs from the command line, and its smoke run leaves the kept results alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.conftest import ForkServer, environment

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("cards", "digits_networks", "gpu_check", "harness", "processes", "result_table", "worker")
SCRIPTS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem not in PARTS)
RESULTS = ROOT / "benchmarks" / "results"
DATA = [f"data_{name}" for name in ("tensors", "large", "images", "cold", "memory")]  # see test_data.py


@pytest.fixture(autouse=True)
def _kept_results_stay() -> Iterator[None]:
    before = {p: p.stat().st_mtime_ns for p in RESULTS.iterdir()}
    yield
    assert {p: p.stat().st_mtime_ns for p in RESULTS.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke_run_writes_a_result_in_which_nothing_failed(
    script: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    arguments = ["--smoke", "--results", str(tmp_path)]
    told = fork_server.run("script", {"module": f"benchmarks.{script}", "arguments": arguments}, timeout=250)
    assert told.get("metrics") == {"done": 1}, told
    well_formed(tmp_path, script)


def test_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.staging", "--smoke", "--results", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    well_formed(tmp_path, "staging")


def well_formed(folder: Path, script: str) -> None:
    (written,) = folder.glob("*.json")
    content = json.loads(written.read_text())
    assert content["name"] == script
    for told in content["rounds"]:
        assert {name: run.get("error") for name, run in told["runs"].items()} == {
            variant["name"]: None for variant in content["variants"]
        }
        assert all(run["metrics"] for run in told["runs"].values())


def test_every_kept_result_has_its_script_and_says_where_it_was_measured() -> None:
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["name"] == path.stem
        assert path.stem in [*SCRIPTS, *DATA, "data_large_only", "gpu_check"], f"{path.name} has no script of that name"
        assert content["hardware"]["device_name"]
        assert content["versions"]["torch"]
