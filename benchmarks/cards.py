"""Writes the measured tables of the documents anew, from the results files.

A document says in a comment what its table shows; what stands between that and the next comment is replaced::

    <!-- measured: optimizer_step; rows: transformer*; seconds_per_step as ms; state_bytes as MB -->
    <!-- end of measured -->

Each column is a metric and its unit (``s``, ``ms``, ``us``, ``MB``, ``MiB``, ``percent``, ``number``), with a
title of its own after ``=`` if the metric's name is not good enough (``seconds_per_step as ms = step``). Where the
result holds a ratio to a baseline, it stands beside the median, with the least and the greatest of a round. ``rows``
are variants by name, with wildcards, divided by ``|``; without it all are shown.

    python -m benchmarks.cards [FILE ...]
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["documents", "with_tables"]

_ROOT = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results"
_MARKED = re.compile(r"(<!-- measured: (?P<asked>[^>]*?) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
_FACTORS = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6, "MiB": 1 / (1 << 20), "percent": 100.0, "number": 1.0}


def documents() -> list[Path]:
    """All documents that may hold such tables."""
    return [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]


def with_tables(text: str, place: Path) -> str:
    """The text of the document at ``place``, its tables as the results files are now."""
    return _MARKED.sub(lambda found: f"{found[1]}{_table(found['asked'], place)}{found[3]}", text)


def _table(asked: str, place: Path) -> str:
    name, *parts = (part.strip() for part in asked.split(";"))
    rows = ["*"]
    columns: list[tuple[str, str, str]] = []
    for part in parts:
        if part.startswith("rows:"):
            rows = [pattern.strip() for pattern in part.removeprefix("rows:").split("|")]
            continue
        told, _, title = part.partition("=")
        metric, _, unit = (word.strip() for word in told.partition(" as "))
        if unit not in _FACTORS:
            raise ValueError(f"{place}: {part!r} must be METRIC as UNIT, with one of {', '.join(_FACTORS)}.")
        shown = "" if unit in ("number", "percent") else f", {unit}"
        columns.append((metric, unit, f"{title.strip() or metric.replace('_', ' ')}{shown}"))
    file = _RESULTS / f"{name}.json"
    content = json.loads(file.read_text())
    lines = [f"| variant | {' | '.join(title for *_, title in columns)} |", f"|---|{'---:|' * len(columns)}"]
    against: set[str] = set()
    for variant, summary in content["summary"].items():
        if not any(fnmatch.fnmatchcase(variant, pattern) for pattern in rows):
            continue
        if any(metric in summary["metrics"] for metric, *_ in columns):
            lines.append(f"| {variant} | {' | '.join(_cell(summary, m, unit) for m, unit, _ in columns)} |")
        if any(metric in summary["ratios"] for metric, *_ in columns):
            against.add(summary["baseline"])
    if len(lines) == 2:
        raise ValueError(f"{place}: {file.name} has no variant like {', '.join(rows)} with these metrics.")
    return f"{_heading(content, file, place, sorted(against))}\n\n" + "\n".join(lines) + "\n"


def _cell(summary: Mapping[str, Any], metric: str, unit: str) -> str:
    if metric not in summary["metrics"]:
        return ""
    value = _number(summary["metrics"][metric]["median"] * _FACTORS[unit]) + (" %" if unit == "percent" else "")
    ratio = summary["ratios"].get(metric)
    if ratio is None:
        return value
    least, middle, most = (_number(ratio[key]) for key in ("min", "median", "max"))
    return f"{value}; {middle}x" + (f" ({least} to {most})" if least != most else "")


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _heading(content: Mapping[str, Any], file: Path, place: Path, against: list[str]) -> str:
    hardware, rounds = content["hardware"], content["settings"]["rounds"]
    up = "../" * (len(place.relative_to(_ROOT).parts) - 1)
    threads = content["environment"].get("OMP_NUM_THREADS")
    told = [
        hardware["device_name"],
        *([] if threads is None else ["one thread" if threads == "1" else f"{threads} threads"]),
        f"torch {content['versions']['torch']}",
        "one round" if rounds == 1 else f"{rounds} alternating rounds",
        f"[{file.name}]({up}benchmarks/results/{file.name}), `{content['command']}`",
    ]
    ratios = ""
    if against:
        ratios = f" After the median the ratio to {' or '.join(repr(one) for one in against)}, above 1 is better"
        ratios += "." if rounds == 1 else ", with the least and the greatest of a round."
    return f"Medians; {', '.join(told)}.{ratios}"


def main() -> None:
    """Write the documents."""
    for place in [Path(name).resolve() for name in sys.argv[1:]] or documents():
        before = place.read_text()
        after = with_tables(before, place)
        if after != before:
            place.write_text(after)
            print(f"Written: {place.relative_to(_ROOT)}")


if __name__ == "__main__":
    main()
