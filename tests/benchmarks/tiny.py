"""Tiny functions for the harness to run, with outcomes known beforehand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_called: dict[str, int] = {}


def known(value: float, log: str = "", name: str = "") -> dict[str, float]:
    if log:
        with Path(log).open("a") as stream:
            stream.write(f"{name}\n")
    return {"seconds": value, "rate": 1 / value}


def by_round(values: list[float], counter: str) -> dict[str, float]:
    """Another value in each call, counted by the length of a file."""
    path = Path(counter)
    done = path.stat().st_size if path.exists() else 0
    with path.open("a") as stream:
        stream.write("x")
    return {"seconds": values[done]}


def process() -> dict[str, float]:
    _called["process"] = _called.get("process", 0) + 1
    Path("left_behind.txt").write_text("x")
    return {
        "pid": os.getpid(),
        "leads": float(os.getsid(0) == os.getpgrp() == os.getpid()),
        "calls": _called["process"],
        "threads": float(os.environ.get("OMP_NUM_THREADS", 0)),
        "imported": float("torch" in sys.modules),
    }


def torch_threads() -> dict[str, float]:
    """Torch's threads, if it is imported already."""
    torch = sys.modules.get("torch")
    return {"imported": float(torch is not None), "threads": float(torch.get_num_threads() if torch else 0)}


def failing() -> dict[str, float]:
    raise ValueError("boom <b>")


def failing_at(calls: list[int], counter: str) -> dict[str, float]:
    path = Path(counter)
    done = path.stat().st_size if path.exists() else 0
    with path.open("a") as stream:
        stream.write("x")
    if done in calls:
        raise ValueError(f"call {done}")
    return {"seconds": 1.0}


def crashing() -> dict[str, float]:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def exiting(code: int) -> dict[str, float]:
    print("last words")
    sys.exit(code)


def hanging(pids: str) -> dict[str, float]:
    """Hangs, with children in its session and in one of their own, which outlive it unless they are killed."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
    Path(pids).write_text(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
    time.sleep(600)
    return {}


def leaving_a_child(pids: str) -> dict[str, float]:
    """Leaves a program, and a fork that holds whatever this process has open."""
    child = subprocess.Popen(["sleep", "600"])
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
        os._exit(0)
    Path(pids).write_text(f"{child.pid} {fork}")
    return {"seconds": 1.0}


def wrong(kind: str) -> object:
    return {"none": None, "empty": {}, "text": {"seconds": "1"}, "nan": {"seconds": float("nan")}}[kind]
