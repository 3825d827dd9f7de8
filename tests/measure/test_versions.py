"""The versions are those that Python itself reports."""

from __future__ import annotations

import platform

import lightning
import torch

from lightning_speedkit.measure import read_versions
from lightning_speedkit.version import __version__


def test_versions() -> None:
    versions = read_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["lightning"] == lightning.__version__
    assert versions["lightning_speedkit"] == __version__
