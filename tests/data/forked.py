"""Runs a function in a forked child, which may be killed there, and says how the child ended."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


def end_of_fork(function: Callable[[], Any]) -> str:
    """``"returned"``, ``"raised"`` (with the traceback on stderr) or the name of the signal that ended the child."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "returned" if os.WEXITSTATUS(status) == 0 else "raised"


def kill_self() -> None:
    """End this process at once, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)
