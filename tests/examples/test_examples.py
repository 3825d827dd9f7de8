"""Every script in examples/ runs as a reader would run it, offline and in a few seconds, and does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WORDS = {
    "command_line.py": ["fit", "--config", str(ROOT / "examples" / "command_line.yaml"), "--trainer.max_epochs", "1"],
    "find_learning_rate.py": ["--fast", "--plot", "../curve.svg"],
}
SAYS = {
    "distill_and_round.py": r"3 layers trained with rounding, 3 in int8.*teacher: .* 0\.9.*taught, int8: .* 0\.[89]",
    "quantize_on_fit_end.py": r"Quantized to dynamic-int8.*torch-ao-dynamic: kept.*report.html.*answers alike: True",
    "lighten_and_distill.py": r"layers replaced.*accuracy: 0\.9\d+ before, .* after 2 epochs.*weights load into",
    "prune_and_quantize.py": r"whole: 0 of 84480 .*80 % zeros: 67584 of 84480 .*half of the units: ",
    "big_batch_little_memory.py": r"1000 characters: .* at once: \d+\s.* differ by at most (0\.0e|[\d.]+e-0[6-9])",
    "compile_and_channels_last.py": r"plain: 19 steps.*channels-last: 19 steps.*compiled: 19 steps.*net compiled in ",
    "command_line.py": r"GradientClipping, NonFiniteGuard, SpikeGuard, Opt.*, ScheduleChoice.*AdamW, fused: True.* 0\.",
    "find_learning_rate.py": r"suggestion 0\.0.*one rate: .*averaged.*schedule: .*schedule-free: validation loss \d",
    "largest_batch.py": r"memory: batch size 64 of 8, 16, 32, 64\s.*put: batch size \d+ of 8, .* validation loss \d",
    "watch_memory.py": r"ended with: CUDA out of memory.*preset .*leak: Classifier\.losses: .*peak in validation",
    "fsdp.py": r"accuracy 0\.\d+ on held-out digits; each process held 33413 of 66826 weights",
    "pipeline.py": r"accuracy 0\.[6-9]\d+ on held-out digits; 42634 weights, trained on 2 processes",
    "plan_for_a_cluster.py": r"DDP 16 .*single device.*2\(n-1\)/n x .*speedkit_ddp.*two GPUs of 8 GB: pipeline 2",
    "train_stably.py": r"guarded: 7[0-3] steps, validation accuracy 0\.[89].* [1-9]\d* losses .* 3 gradients",
}


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(Path(__file__).with_name("script_runner.py"))]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # at which it ends


def test_there_are_examples() -> None:
    assert {"lmdb_training.py", "presets_and_callbacks.py"} | SAYS.keys() <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_leaves_nothing_behind(script: Path, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    if script.name == "pick_backbone.py":
        pytest.importorskip("torchvision")
    work, temporary, output = tmp_path / "work", tmp_path / "temporary", tmp_path / "output.txt"
    work.mkdir()
    temporary.mkdir()
    words = [str(script), *WORDS.get(script.name, ["--fast"])]
    asked = {"words": words, "folder": str(work), "temporary": str(temporary), "output": str(output)}
    assert runner.stdin is not None
    assert runner.stdout is not None
    print(json.dumps(asked), file=runner.stdin, flush=True)
    code = runner.stdout.readline().strip()
    told = output.read_text()
    assert code == "0", told
    assert re.search(SAYS.get(script.name, "samples/s"), told, re.DOTALL), told
    left = [path for path in temporary.iterdir() if path.name != ".ses"]  # onnxruntime writes that when imported
    assert left == []
    assert list(work.iterdir()) == []
    assert (tmp_path / "curve.svg").exists() == ("../curve.svg" in words)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80
