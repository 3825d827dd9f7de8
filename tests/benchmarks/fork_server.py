"""Calls functions in forks of one process that has imported what takes seconds to import.

Each line of its input is what :func:`benchmarks.processes.run_process` takes, as JSON; each line of its output is what
that returns. A process of pytest will not do: it may have threads, which must not be forked.
"""

from __future__ import annotations

import json
import sys

import sklearn.datasets  # noqa: F401 - for the forks

import benchmarks.harness  # noqa: F401 - and with it torch, lightning and the kit
from benchmarks.processes import forkable, run_process

if __name__ == "__main__":
    for line in sys.stdin:
        if not forkable():
            raise RuntimeError("This process has more threads than one.")
        print(json.dumps(run_process(**json.loads(line), forked=True)), flush=True)
