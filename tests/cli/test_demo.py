"""``speedkit demo`` as a command: what it accepts, prints and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_speedkit.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "lightning_speedkit", "demo"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short path: a DataLoader's workers open sockets in it, whose paths have at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="sk", dir="/tmp") as folder:
        yield Path(folder)


def _environment(temporary: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": path}


def test_quick_demo_writes_its_report_and_nothing_else(tmp_path: Path, temporary: Path) -> None:
    environment, work = _environment(temporary), tmp_path / "work"
    work.mkdir()
    result = subprocess.run(
        [*COMMAND, "--quick", "--seed", "4"], cwd=work, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""  # nothing that Lightning or a library says about itself
    for text in ("files, 2 workers", "LMDB, preset ", "batch of 1", "This was a quick run", "On a GPU", "report.html"):
        assert text in result.stdout
    assert "\x1b[" not in result.stdout
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*")) == [
        "speedkit-demo",
        "speedkit-demo/report.html",
        "speedkit-demo/results.json",
    ]
    assert json.loads((work / "speedkit-demo" / "results.json").read_text())["seed"] == 4
    assert list(temporary.iterdir()) == []


def test_ctrl_c_while_training_ends_with_130_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    out = tmp_path / "out"
    environment = _environment(temporary)
    process = subprocess.Popen(
        [*COMMAND, "--out", str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while not list(temporary.glob("speedkit-demo-*/stores/test.lmdb")):  # the last thing before the trainings
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to the whole group
        printed, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, printed + errors
    assert "Stopped." in errors
    assert "Traceback" not in errors
    assert list(temporary.iterdir()) == []
    assert not out.exists()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(["demo", "--quick", "--out", str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err == f"speedkit demo: --out {tmp_path / 'taken'} cannot be used: File exists.\n"
    assert main(["demo", "--quick", "--out", str(tmp_path / "taken" / "inside")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    with pytest.raises(FileExistsError):
        main(["--debug", "demo", "--quick", "--out", str(tmp_path / "taken")])


@pytest.mark.parametrize("seed", ["-1", "4294967296", "one"])
def test_a_seed_that_is_none_is_refused(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--seed", seed])
    assert stop.value.code == 2
    assert "--seed" in capsys.readouterr().err
