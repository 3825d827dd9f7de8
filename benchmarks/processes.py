"""Runs one function of a benchmark in a process of its own, and says what came of it.

The process is a fresh interpreter, or, where only whether it runs is asked, a fork of this one: that has imported what
takes seconds to import, but it is neither cold nor clean, so that nothing should be measured in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.worker import ROOT, answer, without_paths

__all__ = ["descendants", "forkable", "run_process"]

_LAST_WORDS = 2000  # characters of what a process printed


def forkable() -> bool:
    """Whether this process has one thread. A fork has no other, and waits for ever for what they held."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def descendants(process: int) -> list[int]:
    """The processes that it has started, and that these have, as long as each one's parent lives."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:  # it has ended
        return found
    for task in tasks:
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def run_process(
    function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], timeout: float, *, forked: bool = False
) -> dict[str, Any]:
    """Call ``"module:function"`` in a process; its ``metrics`` and ``process_seconds``, or the ``error``.

    ``environment`` is added to this process's. After ``timeout`` seconds, or when the function is done, the process is
    killed with all that it has started. It works in a folder that goes with it.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        asked, told, log = (Path(folder, name) for name in ("asked.json", "answer.json", "log.txt"))
        asked.write_text(json.dumps({"function": function, "arguments": dict(arguments)}))
        log.touch()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        start = time.perf_counter()
        begin = _begin_fork if forked else _begin_fresh
        process, end = begin(asked, told, log, {**environment, "PYTHONPATH": path})
        try:
            done = _ended(process, timeout)
        finally:
            _kill(process)
            code = end()
        seconds = time.perf_counter() - start
        if done and code == 0 and told.exists():
            found: dict[str, Any] = json.loads(told.read_text())
            return {**found, "process_seconds": seconds}
        why = f"the process ended with exit code {code}" if done else f"not done within {timeout:g} s: killed"
        return {"error": f"{why}\n{without_paths(log.read_text(errors='replace')[-_LAST_WORDS:])}".strip()}


def _begin_fresh(asked: Path, told: Path, log: Path, environment: Mapping[str, str]) -> tuple[int, Callable[[], Any]]:
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", str(asked), str(told)],
            env={**os.environ, **environment},
            cwd=asked.parent,  # what a variant leaves behind goes with the folder
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid, process.wait


def _begin_fork(asked: Path, told: Path, log: Path, environment: Mapping[str, str]) -> tuple[int, Callable[[], Any]]:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes write what is still in there
    # not os.fork: a Process cleans up after multiprocessing, and coverage knows it
    process = multiprocessing.get_context("fork").Process(target=_in_fork, args=(asked, told, log, environment))
    process.start()
    assert process.pid is not None

    def end() -> int | None:
        process.join()
        return process.exitcode

    return process.pid, end


def _in_fork(asked: Path, told: Path, log: Path, environment: Mapping[str, str]) -> None:
    """As a fresh interpreter would be started, as far as that can be made up for."""
    os.setsid()
    os.chdir(asked.parent)
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    for name, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (str(log), os.O_WRONLY | os.O_CREAT, (1, 2))):
        file = os.open(name, flags)
        for target in targets:
            os.dup2(file, target)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115 - they stay open
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    if "OMP_NUM_THREADS" in environment:  # which torch has read already
        importlib.import_module("torch").set_num_threads(int(environment["OMP_NUM_THREADS"]))
    answer(asked, told)


def _ended(process: int, timeout: float) -> bool:
    """Whether it ended within so many seconds. It is not reaped, so that its number stays its own."""
    handle = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(handle)


def _kill(process: int) -> None:
    """With what it has started: its group, and where it has not ended also what left the group."""
    for each in descendants(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    for kill in (os.killpg, os.kill):  # a fork that was only just made leads no group yet
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
