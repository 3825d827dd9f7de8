"""Prints a result file of this folder as the table that a method card shows.

python -m benchmarks.data.tables data_tensors [data_cold ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["table"]

_RESULTS = Path(__file__).parents[1] / "results"


def table(content: dict[str, Any]) -> str:
    """Markdown: each variant's median of samples per second, and the median, least and greatest ratio to the baseline.

    >>> numbers = {"median": 1200.0, "min": 900.0, "max": 1300.0}
    >>> ratio = {"median": 2.0, "min": 1.5, "max": 2.5}
    >>> print(table({"baseline": "old", "summary": {
    ...     "old": {"metrics": {"samples_per_second": numbers}, "ratios": {}},
    ...     "new": {"metrics": {"samples_per_second": numbers}, "ratios": {"samples_per_second": ratio}}}}))
    | | samples/s | times old |
    |---|---:|---:|
    | old | 1 200 | |
    | new | 1 200 | 2.0 (1.5 to 2.5) |
    """
    lines = [f"| | samples/s | times {content['baseline']} |", "|---|---:|---:|"]
    for name, summary in content["summary"].items():
        found = summary["metrics"].get("samples_per_second")
        if found is None:
            lines.append(f"| {name} | failed | |")
            continue
        rate = f"{found['median']:,.0f}".replace(",", " ")
        ratio = summary["ratios"].get("samples_per_second")
        told = "" if ratio is None else f"{ratio['median']:.1f} ({ratio['min']:.1f} to {ratio['max']:.1f}) "
        lines.append(f"| {name} | {rate} | {told}|")
    return "\n".join(lines)


def main() -> None:
    """Print the tables of the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="of result files, without .json")
    for name in parser.parse_args().names:
        print(table(json.loads((_RESULTS / f"{name}.json").read_text())), end="\n\n")


if __name__ == "__main__":
    main()
