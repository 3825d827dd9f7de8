"""Runs scripts one after another, each in a fork of one process that has imported what they all import.

Importing takes longer than most of the scripts. A line of JSON on stdin asks for a script, a line on stdout answers
with its exit code. A script that takes too long is ended by a signal.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile

import lightning.pytorch  # noqa: F401

import lightning_speedkit  # noqa: F401

_LIMIT = 200  # seconds


def _begin(words: list[str], folder: str, temporary: str, output: str) -> None:
    """What a shell would have done before the script."""
    signal.alarm(_LIMIT)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(folder)
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])  # noqa: PTH120


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _begin(**asked)
            runpy.run_path(asked["words"][0], run_name="__main__")
            return  # and end as any process does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
