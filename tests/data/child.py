"""Runs a function of a test module in a fresh process, which the test may let die."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_child(
    function: Callable[..., Any], *arguments: Any, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The finished process of ``function(*arguments)``; the arguments must be plain JSON, it prints what it finds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "tests.data.child", function.__module__, function.__name__, json.dumps(arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


if __name__ == "__main__":
    module, name, text = sys.argv[1:]
    getattr(importlib.import_module(module), name)(*json.loads(text))
