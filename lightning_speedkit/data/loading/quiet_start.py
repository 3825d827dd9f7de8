"""Starts a process that Ctrl-C does not touch, from its first instruction on.

Ctrl-C reaches all processes of a terminal. A worker that ignores it only once it runs prints a traceback if it comes
before; so it is held back from before the start until the worker says that it ignores it.

Not so in the children of a fork server: they have the signal mask of the server, which starts those of others too, and
hear Ctrl-C until they ignore it.
"""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from multiprocessing import forkserver, resource_tracker
from typing import Any

__all__ = ["ignore_interrupts", "start_quietly"]


def start_quietly(process: Any) -> None:
    """``process.start()`` with Ctrl-C held back in the child, which calls :func:`ignore_interrupts` first.

    Without Python's warning of every fork of a process that has threads: what the child does is known.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        _start_helpers(getattr(process, "_start_method", None) or multiprocessing.get_start_method())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork\\(\\) may lead to deadlocks.*", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """In the child: drop a Ctrl-C that was held back, and all that come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start_helpers(method: str) -> None:
    """Start what the first child of that kind would start: with Ctrl-C held back already, that would go wrong.

    The resource tracker unblocks SIGINT in whoever starts it (CPython up to 3.13 at least), which lets the child hear
    it. A fork server that was started with SIGINT blocked would hand that on to every process it starts.
    """
    if method == "spawn":
        resource_tracker.ensure_running()
    elif method == "forkserver":
        forkserver.ensure_running()
