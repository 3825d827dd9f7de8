"""A table of backbones as a report, and its Pareto front as a picture."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from lightning_speedkit.architecture.backbone_limits import COSTS, OBJECTIVES
from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.report import (
    Bar,
    BarChart,
    Definitions,
    Document,
    Line,
    LineChart,
    Section,
    Text,
    format_number,
)

if TYPE_CHECKING:
    from lightning_speedkit.architecture.backbone_table import Backbone, BackboneTable

__all__ = ["backbone_document", "draw_front"]

_ACCENT, _QUIET = "#0b63c5", "#8a8f98"
_BEWARE = "Costs say nothing of accuracy: the networks had random weights."


def backbone_document(table: BackboneTable) -> Document:
    """The table, the objective as bars, and the front as a line.

    Args:
        table: What was measured.
    """
    first, second = table.axes
    blocks: list[Any] = [table.table(), Text(_BEWARE, tone="note")]
    sections = [Section("Candidates", blocks)]
    words, unit = COSTS[OBJECTIVES[table.objective]]
    bars = [Bar(row.name, float(getattr(row, first))) for row in table if getattr(row, first) is not None]
    if bars:
        sections.append(Section(words.capitalize(), [BarChart(f"{words}, per candidate", bars, unit=unit)]))
    if table.pareto:
        points = [(getattr(row, first), getattr(row, second)) for row in table.pareto]
        line = Line(", ".join(row.name for row in table.pareto), *zip(*points, strict=True))
        chart = LineChart("Pareto front", [line], x_label=_axis(first), y_label=_axis(second))
        told = Text("Not beaten in one without losing in the other: " + ", ".join(row.name for row in table.pareto))
        sections.append(Section("Pareto front", [told, chart]))
    settings = {
        "device": table.device_name or table.device,
        "threads": str(table.threads),
        "batch size": str(table.batch_size),
        "rounds": str(table.rounds),
        **{limit: format_number(value) for limit, value in table.budget.items()},
        **table.versions,
    }
    sections.append(Section("How it was measured", [Definitions(tuple(settings.items()))]))
    lead = f"{len(table)} candidates, ordered by {'accuracy' if second == 'accuracy' else words}."
    return Document("Backbones and what they cost", sections, lead=lead)


def draw_front(table: BackboneTable) -> str:
    """All candidates that have both values, numbered, as an SVG picture; the same table gives the same bytes.

    Args:
        table: What was measured.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a picture of the front", extra="report", library="matplotlib") from error
    rows = [row for row in table if all(map(math.isfinite, table.point(row)))]
    if not rows:
        raise ValueError(f"No candidate has {' and '.join(map(_axis, table.axes))}; there is nothing to draw.")
    defaults: dict[Any, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    settings: dict[Any, Any] = {**defaults, "svg.fonttype": "none", "svg.hashsalt": "backbones"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 0.24 * max(16, len(rows) + 3)), dpi=72)
        FigureCanvasSVG(figure)
        _draw(figure, table, rows)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    return target.getvalue()


def _draw(figure: Any, table: BackboneTable, rows: list[Backbone]) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    first, second = table.axes
    front = table.pareto
    axes = figure.add_axes((0.09, 0.14, 0.5, 0.8))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_axis(first))
    axes.set_ylabel(_axis(second))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    places = [(getattr(row, first), getattr(row, second)) for row in front]
    axes.plot([x for x, _ in places], [y for _, y in places], color=_ACCENT, linewidth=1.5, zorder=1)
    height = 0.92 / (len(rows) + 1)
    figure.text(0.62, 0.93, "bold: the Pareto front", fontsize=10, color=_QUIET)
    for number, row in enumerate(rows, 1):
        on_front = row in front
        colour = _ACCENT if on_front else _QUIET
        place = (getattr(row, first), getattr(row, second))
        axes.plot(*place, marker="o", markersize=15, color=colour, zorder=2 + on_front)
        axes.annotate(str(number), place, ha="center", va="center", fontsize=9, color="white", zorder=4 + on_front)
        weight = "bold" if on_front else "normal"
        name = f"{number}  {row.name}"
        figure.text(0.62, 0.93 - number * height, name, fontsize=10, color=colour, weight=weight, parse_math=False)


def _axis(name: str) -> str:
    words, unit = COSTS.get(name, (name, ""))
    return f"{words}, {unit}" if unit else words
