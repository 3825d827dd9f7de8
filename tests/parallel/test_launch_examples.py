"""Runs that are started as users start them: torchrun, Lightning's own launcher, SLURM's and Kubernetes' variables.

torchrun and Lightning's launcher are real. There is no SLURM and no Kubernetes here: a script in the place of ``srun``
starts the tasks with the variables that ``srun`` sets, and the variables of the pods are read from the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.parallel import launched_training
from tests.parallel.test_spot_interruption import start_on, weights
from tests.preloaded import ROOT, run_forked, start_forked

EXAMPLES = ROOT / "examples" / "launch"
TRAINING = str(Path(launched_training.__file__))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LIMIT = 50.0
SRUN = """\
#!{python}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--kill-on-bad-exit")]
nodes, tasks = int(os.environ["NODES"]), int(os.environ["TASKS"])
job = {{"SLURM_NTASKS": str(nodes * tasks), "SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": str(tasks)}}
ranks = [
    {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % tasks), "SLURM_NODEID": str(rank // tasks)}}
    for rank in range(nodes * tasks)
]
started = [subprocess.Popen(command, env={{**os.environ, **job, **rank}}) for rank in ranks]
sys.exit(max(one.wait() for one in started))
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def run(command: Sequence[str], log: Path, **variables: str) -> tuple[int, str]:
    """The exit code of a command and what it printed; whatever it has started is ended with it, if it takes long."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(LIMIT)
            _wait_for_group(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, log.read_text(errors="replace")


def _wait_for_group(group: int) -> None:
    """Until none of the processes that it has started is there; those that torchrun starts have groups of their own."""
    end = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.1)


def is_gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"  # ended, and its parent has not looked yet


def check_all_are_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    assert len(pids) == 2
    end = time.monotonic() + 20
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in pids if not is_gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def check_same_weights(folder: Path, other: Path) -> None:
    other.mkdir()
    start_on(other)
    for name, whole in weights(other).items():
        assert torch.equal(weights(folder)[name], whole), name


def words(folder: Path, send: list[Any] | None) -> list[str]:
    folder.mkdir()
    return [TRAINING, str(folder), json.dumps(send), "{}"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("to", ["1", "parent"])
def test_torchrun_and_its_processes_are_told_to_stop(tmp_path: Path, to: str) -> None:
    folder = tmp_path / "run"
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", *words(folder, ["SIGTERM", to, 1, 4])]
    code, told = run(command, tmp_path / "log.txt")
    assert code == (0 if to == "1" else 1), told  # torchrun itself says that it got a signal
    assert len(re.findall("SIGTERM came to rank [01]. All ranks have saved .*interrupted.ckpt at step 6", told)) == 1
    assert "Traceback" not in told.partition("SignalException")[0].partition("Traceback")[0]
    check_all_are_gone(folder)
    assert not (folder / "weights.pt").exists()
    start_on(folder)
    check_same_weights(folder, tmp_path / "whole")


@pytest.mark.timeout(60)
def test_torchrun_starts_again_what_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [TORCHRUN, *options, *words(folder, ["SIGKILL", "1", 1, 4])]
    code, told = run(command, tmp_path / "log.txt", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # as torchrun.sh sets it
    assert code == 0, told
    assert "Rank 0 ends: another rank has ended" in told
    check_all_are_gone(folder)
    check_same_weights(folder, tmp_path / "whole")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_that_lightning_started_is_told_to_stop(tmp_path: Path, rank: str) -> None:
    folder = tmp_path / "run"
    code, told = run([sys.executable, *words(folder, ["SIGTERM", rank, 1, 4])], tmp_path / "log.txt")
    assert code == 0, told
    assert f"SIGTERM came to rank {rank}. All ranks have saved" in told
    assert "Traceback" not in told
    check_all_are_gone(folder)
    start_on(folder)
    check_same_weights(folder, tmp_path / "whole")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_that_lightning_started_is_killed(tmp_path: Path, rank: str) -> None:
    folder = tmp_path / "run"
    code, told = run([sys.executable, *words(folder, ["SIGKILL", rank, 1, 4])], tmp_path / "log.txt")
    # Lightning's launcher looks after its processes now and then, and kills all when one has died.
    assert code in ([-9] if rank == "0" else [1, -9]), told
    assert re.search(f"Rank {1 - int(rank)} ends: another rank has|Child process .* terminated with code -9", told), (
        told
    )
    check_all_are_gone(folder)


@pytest.mark.timeout(60)
def test_the_torchrun_example(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    code, told = run(
        ["bash", str(EXAMPLES / "torchrun.sh"), "--folder", str(tmp_path / "saved"), "--epochs", "1"],
        tmp_path / "log.txt",
        PATH=path,
        PORT=free_port(),
    )
    assert code == 0, told
    assert re.search(r"\d+ steps, 2 ranks, started by torchrun", told), told


def _with_srun(folder: Path, srun: str) -> dict[str, str]:
    """The variables of a batch job, with other programs in the place of those of SLURM."""
    programs = folder / "programs"
    programs.mkdir()
    python, scontrol = f'#!/bin/bash\nexec {sys.executable} "$@"\n', '#!/bin/bash\necho "scontrol $*"\n'
    for name, text in (("python", python), ("srun", srun), ("scontrol", scontrol)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    submitted = folder / "submitted"
    submitted.mkdir()
    (submitted / "train.py").symlink_to(EXAMPLES / "train.py")
    return {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "SLURM_SUBMIT_DIR": str(submitted),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "digits",
        "SLURM_NODELIST": "localhost,other",
        "MASTER_PORT": free_port(),
    }


def _asked(option: str) -> str:
    found = re.search(rf"^#SBATCH --{option}=(\S+)", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.timeout(60)
def test_the_slurm_example(tmp_path: Path) -> None:
    script = str(EXAMPLES / "slurm.sbatch")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    variables = _with_srun(tmp_path, SRUN.format(python=sys.executable))
    variables |= {"NODES": _asked("nodes"), "TASKS": _asked("ntasks-per-node")}
    code, told = run(["bash", script, "--epochs", "1"], tmp_path / "log.txt", **variables)
    assert code == 0, told
    assert re.search(r"\d+ steps, 2 ranks, started by slurm", told), told
    assert "scontrol" not in told


def test_the_slurm_example_goes_back_into_the_queue(tmp_path: Path) -> None:
    variables = _with_srun(
        tmp_path, '#!/bin/bash\nsleep 0.05; touch "$SLURM_SUBMIT_DIR/checkpoints/interrupted.ckpt"\n'
    )
    code, told = run(["bash", str(EXAMPLES / "slurm.sbatch")], tmp_path / "log.txt", **variables)
    assert (code, told) == (0, "scontrol requeue 4711\n")


def _run_example(arguments: list[str]) -> None:
    sys.argv = [str(EXAMPLES / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _pod(index: int, port: str) -> dict[str, str]:
    """The variables of a pod, as its manifest says, with this machine in the place of the first pod."""
    (job,) = (part for part in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()) if part["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    index_of_pod = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variables = {}
    for one in container["env"]:
        if "value" not in one:
            assert one["valueFrom"]["fieldRef"]["fieldPath"] == index_of_pod
        variables[one["name"]] = one.get("value", str(index))
    assert variables["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    return {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.timeout(60)
def test_the_kubernetes_example(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log.txt"
    arguments = ["--folder", str(tmp_path / "saved"), "--epochs", "1"]
    with contextlib.ExitStack() as stack:
        pods = [
            stack.enter_context(start_forked(_run_example, arguments, log=log, environment=_pod(index, port)))
            for index in range(2)
        ]
        codes = [pod.wait(LIMIT / 2) for pod in pods]
    told = log.read_text(errors="replace")
    assert codes == [0, 0], told
    assert re.search(r"\d+ steps, 2 ranks, started by variables", told), told


@pytest.mark.timeout(60)
def test_half_of_the_variables_end_the_example_at_once(tmp_path: Path) -> None:
    ended = run_forked(_run_example, [], timeout=LIMIT, environment={"RANK": "1", "WORLD_SIZE": "2"})
    assert ended.returncode == 1
    assert "RANK=1, WORLD_SIZE=2 are set, and LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not." in ended.stderr


@pytest.mark.timeout(60)
def test_a_port_in_use_ends_the_example_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        ended = run_forked(_run_example, [], timeout=LIMIT, environment=_pod(0, port))
    assert ended.returncode == 1
    assert f"The port {port} (MASTER_PORT) is in use on this machine" in ended.stderr


def test_the_examples_are_short() -> None:
    for path in EXAMPLES.iterdir():
        assert path.is_dir() or len(path.read_text().splitlines()) < 80
