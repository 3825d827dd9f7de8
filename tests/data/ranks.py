"""Runs a function of a test module on two ranks, as ``tests.two_ranks`` does, in children of the fork server.

The server has loaded the kit before it forks, so a rank begins at once instead of loading torch for seconds; a fork of
the test's own process would not do, since autograd refuses to work in it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.two_ranks import _free_port

__all__ = ["on_two_ranks"]


def on_two_ranks(function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What ``function(*arguments)`` returned on each of two ranks; arguments and results must pickle."""
    context, method = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method(allow_none=True)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(_free_port())
        ranks = [
            context.Process(target=_run, args=(rank, port, folder, dict(os.environ), method, function, arguments))
            for rank in range(2)
        ]
        try:
            for process in ranks:
                process.start()
            codes = _wait(ranks, timeout)
        finally:
            for process in ranks:
                _end(process)
        logs = [path.read_text()[-6000:] if path.exists() else "" for path in (folder / f"log{r}" for r in range(2))]
        printed = "\n".join(f"--- rank {rank}: exit {codes[rank]}\n{logs[rank]}" for rank in range(2))
        assert codes == [0, 0], f"two ranks of {function.__qualname__} within {timeout} s:\n{printed}"
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(2)]


def _wait(ranks: list[Any], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if None not in codes:
            return codes
        if any(code not in (0, None) for code in codes):
            end = min(end, time.monotonic() + 10.0)  # the other one waits for a rank that is gone
        time.sleep(0.02)
    return [process.exitcode for process in ranks]


def _end(process: Any) -> None:
    if process.pid is None:
        return
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):  # of its group; it may have none yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _run(
    rank: int,
    port: str,
    folder: Path,
    environment: dict[str, str],
    method: str | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.clear()
    os.environ.update({**environment, **numbers, **place})
    multiprocessing.set_start_method(method, force=True)  # it would be that by which the rank was started
    torch.set_num_threads(1)
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(*arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group left by the Trainer must not hold the exit
