"""The versions that a measurement depends on."""

from __future__ import annotations

import platform
from importlib import metadata

from lightning_speedkit.version import __version__

__all__ = ["read_versions"]


def read_versions() -> dict[str, str]:
    """Python, torch, lightning, this package and the operating system.

    >>> sorted(read_versions())
    ['lightning', 'lightning_speedkit', 'os', 'python', 'torch']
    """
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "lightning": metadata.version("lightning"),
        "lightning_speedkit": __version__,
        "os": platform.platform(),
    }
