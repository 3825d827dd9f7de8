"""One process from which the slow tests of this folder are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.worker import ROOT


def environment() -> dict[str, str]:
    """For what a test of this folder starts: torch on one thread, and no coverage, which takes as long as the runs do.

    That a benchmark runs a part of the kit does not test it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


class ForkServer:
    """``tests/benchmarks/fork_server.py``, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.fork_server"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, function: str, arguments: dict[str, Any], timeout: float, **added: str) -> dict[str, Any]:
        """Call a function of ``tests/benchmarks/forked.py`` in a fork; its ``metrics`` or its ``error``."""
        name = f"tests.benchmarks.forked:{function}"
        asked = {"function": name, "arguments": arguments, "environment": added, "timeout": timeout}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
