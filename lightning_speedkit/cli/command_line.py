"""What several subcommands read from a command line: whole numbers, and modules of the user in the current folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["modules_of_this_folder", "whole_number"]


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type for argparse: an ``int`` from ``least`` on, up to ``most`` if that is given.

    >>> whole_number(1, 95)("90")
    90
    """
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {value}")
        return value

    number.__name__ = "whole number"  # argparse says "invalid whole number value" of what is none
    return number


@contextmanager
def modules_of_this_folder() -> Iterator[None]:
    """Let a module in the current folder be imported in the block, as ``python -m`` does; then all is as it was."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
