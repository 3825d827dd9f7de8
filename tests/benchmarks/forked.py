"""What the fork server is asked to call."""

from __future__ import annotations

import io
import os
import runpy
import sys
from typing import Any

from rich.console import Console

from benchmarks.harness import Variant, run_benchmark
from benchmarks.processes import forkable
from benchmarks.worker import ROOT


def script(module: str, arguments: list[str]) -> dict[str, float]:
    """A script, as the command line would run it."""
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return {"done": 1.0}


def harness(variants: list[dict[str, Any]], settings: dict[str, Any], results: str) -> dict[str, float]:
    """The harness with ``forked=True``, and whether it could fork; what it returns is in its file."""
    settings = {**settings, "console": Console(file=io.StringIO()), "results": results, "forked": True}
    run_benchmark("test", [Variant(**each) for each in variants], **settings)
    return {"forkable": float(forkable())}
