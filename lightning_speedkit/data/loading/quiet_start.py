"""Starts a process that Ctrl-C does not touch, from its first instruction on.

Ctrl-C reaches all processes of a terminal. A worker that ignores it only once it runs prints a traceback if it comes
before; so it is held back from before the start until the worker says that it ignores it.
"""

from __future__ import annotations

import signal
import warnings
from typing import Any

__all__ = ["ignore_interrupts", "start_quietly"]


def start_quietly(process: Any) -> None:
    """``process.start()`` with Ctrl-C held back in the child, which calls :func:`ignore_interrupts` first.

    Without Python's warning of every fork of a process that has threads: what the child does is known.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork\\(\\) may lead to deadlocks.*", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def ignore_interrupts() -> None:
    """In the child: drop a Ctrl-C that was held back, and all that come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
