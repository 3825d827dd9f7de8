"""Shows a result file in the terminal: a table for each metric, and the errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_speedkit.report import format_number

__all__ = ["print_result"]


def print_result(content: Mapping[str, Any], console: Console | None = None) -> None:
    """The summary of a result file as a table for each metric."""
    out = console or Console()
    out.print(Text(f"{content['name']}, rounds: {content['settings']['rounds']}", style="bold"))
    summary = content["summary"]
    for metric in dict.fromkeys(metric for told in summary.values() for metric in told["metrics"]):
        table = Table("variant", title=Text(metric), title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("median", "ratio", "quartiles", "min – max"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, told in summary.items():
            if metric in told["metrics"]:
                median = format_number(told["metrics"][metric]["median"])
                ratio = told["ratios"].get(metric)
                label = Text(name) if ratio is None else Text(f"{name}\n  against {told['baseline']}")
                table.add_row(label, median, *_ratio_cells(ratio))
        out.print(table)
    for name, told in summary.items():
        for error in told["errors"]:
            out.print(Text(f"{name}: {error}", style="red"))
    out.print(Text("A ratio above 1 is better than the variant it is against. (?): unclear, the quartiles hold 1."))


def _ratio_cells(ratio: Mapping[str, Any] | None) -> list[Text]:
    if ratio is None:
        return []
    texts = [f"{ratio['median']:.3f}×{'' if ratio['clear'] else ' (?)'}"]
    texts += [f"{ratio[low]:.3f}–{ratio[high]:.3f}" for low, high in (("q1", "q3"), ("min", "max"))]
    return [Text(text) for text in texts]
