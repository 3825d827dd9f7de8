"""Runs a function of a test module in two real processes joined by gloo on loopback.

``on_two_ranks(function, *arguments)`` returns what the function returned on rank 0 and on rank 1. Inside, a
``Trainer(accelerator="cpu", devices=2, strategy=...)`` finds its rank in the environment and starts no processes.
A rank that fails, or that is not done in time, fails the test with what both ranks printed; all are ended.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_two_ranks(function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What ``function(*arguments)`` returned on each of two ranks; arguments and results must pickle."""
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call.pickle")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        port = str(_free_port())
        logs = [Path(folder, f"log{rank}.txt") for rank in range(2)]
        ranks = [_start(rank, port, call, logs[rank]) for rank in range(2)]
        try:
            codes = _wait(ranks, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed = "\n".join(f"--- rank {r}: exit {codes[r]}\n{logs[r].read_text()[-6000:]}" for r in range(2))
        assert codes == [0, 0], f"two ranks of {function.__qualname__} within {timeout} s:\n{printed}"
        return [pickle.loads(Path(folder, f"result{rank}.pickle").read_bytes()) for rank in range(2)]


def _start(rank: int, port: str, call: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.two_ranks", str(call), str(rank)],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return codes
        if any(code not in (0, None) for code in codes):
            end = min(end, time.monotonic() + 10.0)  # the other one waits for a rank that is gone
        time.sleep(0.05)
    return [process.poll() for process in ranks]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(call: str, rank: str) -> None:
    module, name, arguments = pickle.loads(Path(call).read_bytes())
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    result = target(*arguments)
    Path(call).with_name(f"result{rank}.pickle").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group left by the Trainer must not hold the exit


if __name__ == "__main__":
    _main(*sys.argv[1:])
