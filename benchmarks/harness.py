"""The one harness of all benchmarks: variants side by side, each run in a fresh process, in alternating order.

A variant names a function that measures something and returns numbers. After the warm-up rounds every round runs every
variant once, forwards in one round and backwards in the next, so that a machine that grows slower treats them alike.
Variants are compared round by round: the ratio of a round is the baseline's number to the variant's from the same
round, the other way round where more is better, so that above 1 is always a gain. What is reported of the ratios is
their median and their spread; an interquartile range that contains 1 is called unclear. A variant that fails, or hangs,
is recorded with its error and the others go on. Everything measured is in the result file, also what turned out worse.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.processes import forkable, run_process
from benchmarks.result_table import print_result
from benchmarks.worker import ROOT, call, last_line
from lightning_speedkit.facts import write_json
from lightning_speedkit.measure import read_hardware, read_versions

__all__ = ["SCHEMA_VERSION", "Variant", "benchmark_arguments", "print_result", "run_benchmark"]

SCHEMA_VERSION = 1
RESULTS = ROOT / "benchmarks" / "results"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_TIMEOUT = 600.0
_FAILURES_IN_A_ROW = 2  # after so many a variant is not run again


@dataclass(frozen=True)
class Variant:
    """One way to do it. ``function`` is ``"module:function"``; it is called with ``arguments``, which must be JSON, and
    returns a number for each metric. ``baseline`` names the variant to compare with, if not the benchmark's own; its
    own name stands for none. ``requires`` names a module without which it is not run."""

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    requires: str | None = None


def run_benchmark(
    name: str,
    variants: Sequence[Variant],
    *,
    baseline: str | None = None,
    rounds: int = 5,
    warmup: int = 1,
    timeout: float | None = None,
    in_process: bool = False,
    forked: bool = False,
    higher_is_better: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    results: str | os.PathLike[str] = RESULTS,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the variants, write ``<results>/<name>.json``, print a table, and return what was written.

    ``timeout`` is in seconds for one run of one variant (600 if not given); its whole process group is killed then.
    ``environment`` is added to that of the processes, where ``OMP_NUM_THREADS=1`` is set unless it says otherwise.
    With ``in_process=True`` the functions are called here: nothing is fresh, and neither timeout nor environment apply.
    ``forked=True`` is for smoke runs: the processes are forks of this one, which spares them the imports, as long as
    this one has a single thread; with more (numpy starts some unless ``OMP_NUM_THREADS=1`` is set) they are fresh.
    """
    _check(name, variants, baseline, rounds, warmup, timeout, in_process, forked, environment)
    added = {} if in_process else {**_ONE_THREAD, **(environment or {})}
    limit = _TIMEOUT if timeout is None else timeout
    console = console or Console()
    failures = dict.fromkeys((variant.name for variant in variants), 0)
    told: dict[str, list[dict[str, Any]]] = {"warmup": [], "rounds": []}
    for number in range(-warmup, rounds):
        order = list(variants) if number % 2 == 0 else list(reversed(variants))
        runs: dict[str, Any] = {}
        load = os.getloadavg()[0]
        for variant in order:
            if failures[variant.name] >= _FAILURES_IN_A_ROW:
                runs[variant.name] = {"error": f"not run: it failed {_FAILURES_IN_A_ROW} times in a row"}
                continue
            run = _run(variant, added, limit, in_process, forked)
            failures[variant.name] = failures[variant.name] + 1 if "error" in run else 0
            runs[variant.name] = run
        told["warmup" if number < 0 else "rounds"].append(
            {"order": [variant.name for variant in order], "load_average": load, "runs": runs}
        )
    content = {
        "schema": "benchmark",
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": dataclasses.asdict(read_hardware()),
        "versions": read_versions(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "environment": added,
        "settings": {"rounds": rounds, "warmup": warmup, "timeout": limit, "in_process": in_process, "forked": forked},
        "baseline": baseline,
        "higher_is_better": list(higher_is_better),
        "variants": [dataclasses.asdict(variant) for variant in variants],
        "summary": _summary(variants, baseline, told["rounds"], set(higher_is_better)),
        **told,
    }
    path = write_json(json.dumps(content, indent=1, allow_nan=False) + "\n", Path(results, f"{name}.json"))
    print_result(content, console)
    console.print(Text(f"Written: {path}"), soft_wrap=True)
    return content


def benchmark_arguments(
    description: str, rounds: int = 5, parent: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The command line that every benchmark shares: ``rounds``, ``warmup``, ``smoke`` and ``results``.

    ``--smoke`` asks for one round without warm-up, to see that it runs: its numbers mean nothing, so they go to a
    temporary folder unless ``--results`` names another. ``parent`` has the options of this benchmark alone.
    """
    parser = argparse.ArgumentParser(description=description, parents=[parent] if parent else [])
    parser.add_argument("--rounds", type=int, default=rounds, help="measured rounds (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them (%(default)s)")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result file (benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="one round, only to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.warmup = 1, 0
    if arguments.results is None:
        arguments.results = Path(tempfile.mkdtemp(prefix="benchmark-")) if arguments.smoke else RESULTS
    return arguments


def _check(
    name: str,
    variants: Sequence[Variant],
    baseline: str | None,
    rounds: int,
    warmup: int,
    timeout: float | None,
    in_process: bool,
    forked: bool,
    environment: Mapping[str, str] | None,
) -> None:
    names = [variant.name for variant in variants]
    if not name or name != Path(name).name:
        raise ValueError(f"name={name!r} becomes the name of a file; use a plain word.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"The variants need names, each once; got {names}.")
    for wanted in {baseline, *(variant.baseline for variant in variants)} - {None}:
        if wanted not in names:
            raise ValueError(f"baseline={wanted!r} is not one of the variants {names}.")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds={rounds} must be 1 or more, and warmup={warmup} 0 or more.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout} must be above 0 seconds.")
    if in_process and (timeout is not None or environment is not None or forked):
        raise ValueError("in_process=True cannot apply timeout or environment, nor fork; leave them out.")


def _run(variant: Variant, added: Mapping[str, str], timeout: float, in_process: bool, forked: bool) -> dict[str, Any]:
    if variant.requires is not None and importlib.util.find_spec(variant.requires) is None:
        return {"error": f"{variant.requires} is not installed"}
    if in_process:
        return _run_here(variant)
    return run_process(variant.function, variant.arguments, added, timeout, forked=forked and forkable())


def _run_here(variant: Variant) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        metrics = call(variant.function, variant.arguments)
    except Exception as error:  # recorded, so that the others go on
        return {"error": last_line(error)}
    return {"metrics": metrics, "process_seconds": time.perf_counter() - start}


def _summary(
    variants: Sequence[Variant], baseline: str | None, rounds: list[dict[str, Any]], higher: set[str]
) -> dict[str, Any]:
    summary = {}
    for variant in variants:
        runs = [told["runs"][variant.name] for told in rounds]
        metrics = _columns(run.get("metrics", {}) for run in runs)
        against = variant.baseline or baseline
        ratios = {}
        if against is not None and against != variant.name:
            pairs = ((told["runs"][against], told["runs"][variant.name]) for told in rounds)
            ratios = _columns(_ratios(a.get("metrics", {}), b.get("metrics", {}), higher) for a, b in pairs)
        summary[variant.name] = {
            "baseline": against if against != variant.name else None,
            "metrics": {metric: _spread(values) for metric, values in metrics.items()},
            "ratios": {metric: _with_verdict(_spread(values)) for metric, values in ratios.items()},
            "errors": list(dict.fromkeys(run["error"] for run in runs if "error" in run)),
        }
    return summary


def _columns(rows: Any) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for metric, value in row.items():
            columns.setdefault(metric, []).append(value)
    return columns


def _ratios(base: Mapping[str, float], variant: Mapping[str, float], higher: set[str]) -> dict[str, float]:
    ratios = {}
    for metric in base.keys() & variant.keys():
        above, below = (variant, base) if metric in higher else (base, variant)
        if below[metric]:
            ratios[metric] = above[metric] / below[metric]
    return dict(sorted(ratios.items()))


def _spread(values: list[float]) -> dict[str, Any]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"n": len(values), "min": min(values), "q1": q1, "median": median, "q3": q3, "max": max(values)}


def _with_verdict(spread: dict[str, Any]) -> dict[str, Any]:
    return {**spread, "clear": spread["n"] >= 3 and not spread["q1"] <= 1 <= spread["q3"]}
