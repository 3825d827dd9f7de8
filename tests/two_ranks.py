"""Runs a function of a test module in two or more real processes joined by gloo on loopback.

``on_two_ranks(function, *arguments)`` returns what the function returned on rank 0 and on rank 1. Inside, a
``Trainer(accelerator="cpu", devices=2, strategy=...)`` finds its rank in the environment and starts no processes.
A rank that hangs, fails or ends fails the test by its name, with what all ranks printed and, if it hangs, where it
is; all are ended. They begin with torch imported, so the time limit is one of the case alone.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.preloaded import Forked, start_forked

_GRACE = 5.0  # seconds for the other ranks, when one has failed


def on_two_ranks(function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What ``function(*arguments)`` returned on each of two ranks; arguments and results must pickle."""
    return on_ranks(2, function, *arguments, timeout=timeout)


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """The same on so many ranks.

    Raises:
        AssertionError: A rank was not done in time, raised, or ended; the message names the case.
    """
    case = f"{function.__qualname__}({', '.join(map(repr, arguments))})"
    port = str(_free_port())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        logs = [Path(folder, f"log{rank}.txt") for rank in range(world)]
        ranks = [
            stack.enter_context(start_forked(function, *arguments, log=log, environment=_of_rank(rank, world, port)))
            for rank, log in enumerate(logs)
        ]
        codes = _wait(ranks, timeout)
        if codes != [0] * world:
            for process, code in zip(ranks, codes, strict=True):
                if code is None:
                    process.show_where_it_is()
            told = "\n".join(map(_told, range(world), codes, logs))
            raise AssertionError(f"{case} on {world} ranks, within {timeout} s:\n{told}")
        return [process.result() for process in ranks]


def _of_rank(rank: int, world: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _wait(ranks: list[Forked], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return codes
        if any(code not in (0, None) for code in codes):
            end = min(end, time.monotonic() + _GRACE)  # the others wait for a rank that is gone
        ranks[codes.index(None)].wait(min(left, 1.0))
    return [process.poll() for process in ranks]


def _told(rank: int, code: int | None, log: Path) -> str:
    how = "hangs" if code is None else f"ended with exit code {code}"
    return f"--- rank {rank} {how}\n{log.read_text(errors='replace')[-6000:]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
