"""Runs a function in a forked child, which may be killed there, and says how the child ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from posix import _exit as exit_unmeasured
from typing import IO, Any

__all__ = ["end_of_fork", "exit_unmeasured", "kill_self", "output_of_fork", "running_fork", "stop_coverage"]

# ``exit_unmeasured`` is what ``os._exit`` is without coverage, which saves there what it has measured. A child that may
# be killed meanwhile, or that may write no more, would leave half a file.


def end_of_fork(function: Callable[[], Any], *, measured: bool = True, seconds: int = 120) -> str:
    """``"returned"``, ``"raised"`` (with the traceback on stderr) or the name of the signal that ended the child.

    What the child runs counts for coverage if ``measured``; saving it takes longer than most of what is run. It is
    ended by SIGALRM after so many seconds.
    """
    _, status = os.waitpid(_fork(function, measured, seconds), 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "returned" if os.WEXITSTATUS(status) == 0 else "raised"


def output_of_fork(function: Callable[[], Any], *, measured: bool = True) -> tuple[str, str, str]:
    """How the child ended, and what it and its own children wrote to stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def redirected() -> None:
            _redirect(1, out.fileno())
            _redirect(2, err.fileno())
            function()

        end = end_of_fork(redirected, measured=measured)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return end, texts[0], texts[1]


@contextlib.contextmanager
def running_fork(function: Callable[[], Any]) -> Iterator[tuple[int, IO[str]]]:
    """A child that runs the function meanwhile, and what it prints; it is killed if it outlives the block."""
    reading, writing = os.pipe()

    def redirected() -> None:
        os.close(reading)
        _redirect(1, writing)
        os.close(writing)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        function()

    child = _fork(redirected, False, 120)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            yield child, lines
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody has waited for it
            os.waitpid(child, 0)


def stop_coverage() -> None:
    """Measure no more in this process, as long as it lives."""
    coverage = sys.modules.get("coverage")
    measuring = None if coverage is None else coverage.Coverage.current()
    if measuring is not None:
        measuring.stop()


def kill_self() -> None:
    """End this process at once, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _fork(function: Callable[[], Any], measured: bool, seconds: int) -> int:
    leave = os._exit if measured else exit_unmeasured
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            function()
        except BaseException:
            traceback.print_exc()
            leave(1)
        leave(0)
    return child


def _redirect(number: int, file: int) -> None:
    os.dup2(file, number)
    stream = os.fdopen(number, "w", buffering=1, closefd=False)
    if number == 1:
        sys.stdout = stream
    else:
        sys.stderr = stream
