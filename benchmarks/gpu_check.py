"""Runs the techniques of all areas on a CUDA device: whether they are right there, and what they gain.

One GPU, five minutes, one table. Each case runs in a fresh process under a time limit of its own: an error, a crash or
a hang is a row of the table, and the next case goes on. The result file is written by rename before the first case and
after every one, so that a run that is ended early keeps what it has. Cases for which the budget is too short are "not
run". ``--tiny`` runs the same cases on the CPU, in this process, with sizes so small that their numbers mean nothing.

    python -m benchmarks.gpu_check [--budget 300] [--only NAME ...] [--tiny] [--results FOLDER] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu_cases.case_process import CaseProcess
from benchmarks.gpu_cases.case_run import CaseRun, call_case, missing_need
from benchmarks.gpu_cases.registry import CASES, Case
from benchmarks.worker import ROOT

__all__ = ["main", "run_check"]

SCHEMA_VERSION = 1
_RESULTS = ROOT / "benchmarks" / "results"
_LEAST_SHARE = 0.5  # of the seconds that a case asks for: with less it is not run
_FACTS = Case("device", "-", "device:facts", 60)


def run_check(
    cases: Sequence[Case] = CASES,
    *,
    budget: float = 300.0,
    device: str = "cuda",
    tiny: bool = False,
    in_process: bool = False,
    warm: bool = True,
    results: str | os.PathLike[str] = _RESULTS,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the cases within ``budget`` seconds, write ``<results>/gpu_check.json``, print the table.

    Returns what was written; nothing is written where the device cannot be used. ``in_process`` calls the cases here,
    without limits of time; ``warm=False`` spares the processes the imports that all cases need.
    """
    if not budget > 0:
        raise ValueError(f"budget={budget} must be above 0 seconds.")
    began, path = time.monotonic(), Path(results, "gpu_check.json")
    content = _content(cases, budget, device, tiny)
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    caller = _Here(device, tiny) if in_process else _Processes(device, tiny, warm)
    try:
        facts = caller.call(_FACTS, _FACTS.seconds, bool(cases))
        content.update(hardware=facts.pop("hardware", None), versions=facts.pop("versions", None), device=facts)
        if facts["status"] != "ok":
            console.print(f"The device cannot be used, and nothing is written: {facts['error']}", markup=False)
            return content
        _write(content, path)
        for number, (case, row) in enumerate(zip(cases, content["cases"], strict=True), start=1):
            missing = missing_need(case.needs, device, ask_device=False)
            limit = _limit(case, cases[number:], budget - (time.monotonic() - began))
            if missing is not None:
                row["status"] = f"needs {missing}"
            elif in_process or limit >= _LEAST_SHARE * case.seconds:  # else it stays "not run"
                row.update(caller.call(case, limit, number < len(cases)), limit=limit)
                console.print(f"{case.name}: {row['status']}, {row['seconds']:.1f} s", highlight=False, markup=False)
            content["seconds"] = time.monotonic() - began
            _write(content, path)
    finally:
        caller.close()
    print_table(content, console)
    console.print(f"Written: {path}", soft_wrap=True, markup=False)
    return content


class _Here:
    """Calls cases in this process."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = device, tiny

    def call(self, case: Case, limit: float, more: bool) -> dict[str, Any]:
        run = CaseRun(0.0 if self.tiny else limit / 2, self.device, self.tiny)
        told = call_case(case.function, case.needs, run)
        return {**told, "seconds": told["case_seconds"]}

    def close(self) -> None: ...


class _Processes:
    """Calls each case in a fresh process; the next one imports meanwhile, where there are processors for it."""

    def __init__(self, device: str, tiny: bool, warm: bool) -> None:
        self.device, self.tiny, self.warm = device, tiny, warm
        self._next: CaseProcess | None = None

    def call(self, case: Case, limit: float, more: bool) -> dict[str, Any]:
        start = time.monotonic()
        process = self._next or CaseProcess(self.warm)
        self._next = CaseProcess(self.warm) if more and (os.cpu_count() or 1) > 3 else None
        try:
            told = process.run(case.function, case.needs, self.device, self.tiny, limit, 0.5 * limit)
        finally:
            process.close()
        return {**told, "seconds": time.monotonic() - start}

    def close(self) -> None:
        if self._next is not None:
            self._next.close()


def print_table(content: dict[str, Any], console: Console) -> None:
    """One row per case: what came of it, and its numbers; then what went wrong."""
    hardware = content["hardware"] or {}
    title = f"{hardware.get('device_name', '?')}, torch {(content['versions'] or {}).get('torch', '?')}"
    table = Table("case", "area", "result", "s", "numbers and notes", title=title, title_justify="left")
    for row in content["cases"]:
        numbers = [_with_unit(name, value) for name, value in row["numbers"].items()]
        table.add_row(
            *(row["name"], row["area"], row["status"], f"{row['seconds']:.1f}" if row["seconds"] else ""),
            escape("; ".join(numbers + row["notes"])),
        )
    console.print(table)
    for row in content["cases"]:
        for check in row["checks"]:
            if not check["ok"]:
                console.print(f"{row['name']}: wrong: {check['name']}: {check['reason']}", markup=False)
        if row["error"]:
            console.print(f"{row['name']}: {row['error']}", markup=False)
    counts: dict[str, int] = {}
    for row in content["cases"]:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    checks = [check["ok"] for row in content["cases"] for check in row["checks"]]
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{len(content['cases'])} cases: {parts}. {sum(checks)} of {len(checks)} checks hold.", markup=False)


def _with_unit(name: str, value: float) -> str:
    """The unit is the last word of the name.

    >>> _with_unit("bf16 step ms", 12.3456)
    'bf16 step 12.35 ms'
    """
    what, _, unit = name.rpartition(" ")
    return f"{what} {value:.4g} {unit}" if what else f"{name} {value:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. 0: no check failed and nothing ended in an error; 1: something did, or nothing ran."""
    parser = argparse.ArgumentParser(description="Runs the techniques of all areas on a CUDA device.")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases or areas, by name or a part of it")
    parser.add_argument(
        "--tiny", "--smoke", action="store_true", help="tiny sizes on the CPU, in this process: does it run?"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda, unless --tiny")
    parser.add_argument("--results", type=Path, help="folder of the result file (benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="the cases and what they need")
    given = parser.parse_args(arguments)
    try:
        cases = _chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for case in cases:
            print(f"{case.name:26}{case.area:12}{case.seconds:4.0f} s  {', '.join(case.needs)}")
        return 0
    if given.results is None:  # what says nothing of a whole run on a GPU is not kept beside the results
        whole = given.only is None and not given.tiny and given.device != "cpu"
        given.results = _RESULTS if whole else Path(tempfile.mkdtemp(prefix="gpu-check-"))
    device = given.device or ("cpu" if given.tiny else "cuda")
    content = run_check(
        cases, budget=given.budget, device=device, tiny=given.tiny, in_process=given.tiny, results=given.results
    )
    states = [row["status"] for row in content["cases"]]
    return int("wrong" in states or "error" in states or "ok" not in states)


def _chosen(names: Sequence[str] | None) -> list[Case]:
    if names is None:
        return list(CASES)
    chosen = [case for case in CASES if any(name.lower() in f"{case.area} {case.name}".lower() for name in names)]
    for name in names:
        if not any(name.lower() in f"{case.area} {case.name}".lower() for case in CASES):
            raise ValueError(
                f"--only {name!r} is no part of a case; they are {', '.join(case.name for case in CASES)}."
            )
    return chosen


def _limit(case: Case, after: Sequence[Case], left: float) -> float:
    """What the case asks for as long as there is so much; more where all that are left can have more."""
    share = left * case.seconds / (case.seconds + sum(each.seconds for each in after))
    return max(share, min(case.seconds, left))


def _content(cases: Sequence[Case], budget: float, device: str, tiny: bool) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "status": "not run",
        "error": None,
        "seconds": None,
        "numbers": {},
        "checks": [],
        "notes": [],
    }
    return {
        "schema": "gpu_check",
        "schema_version": SCHEMA_VERSION,
        "name": "gpu_check",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": None,
        "versions": None,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "settings": {"budget": budget, "device": device, "tiny": tiny},
        "seconds": 0.0,
        "cases": [
            {"name": case.name, "area": case.area, "needs": list(case.needs), **json.loads(json.dumps(empty))}
            for case in cases
        ],
    }


def _write(content: dict[str, Any], path: Path) -> None:
    """By rename. Whoever ends this process finds the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    if main():
        sys.exit(1)
