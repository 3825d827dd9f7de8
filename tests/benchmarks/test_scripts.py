"""Every benchmark script runs from the command line, and its smoke run leaves the kept results alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem not in ("harness", "worker", "__init__"))
DATA = [f"data_{name}" for name in ("tensors", "large", "images", "cold", "memory")]  # see test_data.py


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke_run_writes_a_result_in_which_nothing_failed(script: str, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (ROOT / "benchmarks" / "results").iterdir()}
    command = [sys.executable, "-m", f"benchmarks.{script}", "--smoke", "--results", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (written,) = tmp_path.glob("*.json")
    content = json.loads(written.read_text())
    failed = {n: r["error"] for told in content["rounds"] for n, r in told["runs"].items() if "error" in r}
    assert failed == {}
    assert {p: p.stat().st_mtime_ns for p in (ROOT / "benchmarks" / "results").iterdir()} == before


def test_every_kept_result_has_its_script_and_says_where_it_was_measured() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        content = json.loads(path.read_text())
        assert content["name"] == path.stem
        assert path.stem in [*SCRIPTS, *DATA], f"{path.name} has no script of that name"
        assert content["hardware"]["device_name"]
        assert content["versions"]["torch"]
