"""Calls one function of a benchmark in a process of its own. Imports nothing that the function does not ask for."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "answer", "call", "last_line", "without_paths"]

ROOT = Path(__file__).resolve().parent.parent


def call(function: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Call ``"module:function"`` and check that it returned finite numbers by name."""
    module, _, name = function.partition(":")
    metrics = getattr(importlib.import_module(module), name)(**arguments)
    if not isinstance(metrics, dict) or not metrics:
        raise TypeError(f"{function} must return a dict of numbers, got {metrics!r}.")
    for metric, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{function} returned {metric}={value!r}, which is not a finite number.")
    return {str(metric): float(value) for metric, value in metrics.items()}


def last_line(error: BaseException) -> str:
    """The error as the last line of its traceback."""
    return without_paths("".join(traceback.format_exception_only(type(error), error)).strip())


def without_paths(text: str) -> str:
    """The text without the folders of this machine."""
    for path, name in ((str(ROOT) + os.sep, ""), (sys.prefix + os.sep, ""), (str(Path.home()), "~")):
        text = text.replace(path, name)
    return text


def answer(asked: Path, told: Path) -> None:
    """Call the function that the file ``asked`` names, and write its ``metrics`` or the ``error`` to ``told``."""
    function = json.loads(asked.read_text())
    try:
        found: dict[str, Any] = {"metrics": call(function["function"], function["arguments"])}
    except Exception as error:  # the harness records it
        found = {"error": last_line(error)}
    told.write_text(json.dumps(found))


if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]))
