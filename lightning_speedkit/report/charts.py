"""Charts as SVG for the inside of a page: drawn by matplotlib, coloured and lettered by the page's style sheet.

Each colour is drawn as a stand-in and then replaced by a CSS variable, so a chart follows the light or dark theme. No
pyplot, no figure kept anywhere, and the same chart always gives the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from typing import Any

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.report.blocks import BarChart, LineChart
from lightning_speedkit.report.numbers import format_number

__all__ = ["draw_chart"]

_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--accent)",
    "#040404": "var(--track)",
    "#050505": "var(--rule)",
    "#060606": "var(--quiet)",
    "#070707": "var(--loss)",
    "#080808": "var(--part-1)",
    "#090909": "var(--part-2)",
    "#0a0a0a": "var(--part-3)",
    "#0b0b0b": "var(--part-4)",
}
_INK, _MUTED, _ACCENT, _TRACK, _RULE, _QUIET, _LOSS, *_PARTS = _COLOURS
_COLOUR = re.compile("|".join(_COLOURS))
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be read aloud and searched
    "font.family": ["DejaVu Sans"],
    "axes.unicode_minus": True,
    "path.simplify": False,
}


def draw_chart(chart: BarChart | LineChart, width: int) -> str:
    """An ``<svg>`` element that many CSS pixels wide, hidden from screen readers: the page tells them in words."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a chart", extra="report", library="matplotlib") from error
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks is drawn by the browser's
        defaults: dict[Any, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
        salt = {"svg.hashsalt": f"{width} {chart.describe()}"}  # ids that differ between the charts of a page
        settings: dict[Any, Any] = {**defaults, **_SETTINGS, **salt}
        matplotlib.rcParams.update(settings)
        figure = Figure(dpi=72)
        FigureCanvasSVG(figure)
        if isinstance(chart, BarChart):
            _draw_bars(figure, chart, width)
        else:
            _draw_lines(figure, chart, width)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(target.getvalue())


def _draw_bars(figure: Any, chart: BarChart, width: int) -> None:
    span = width if chart.baseline is None else width - 92
    values = [format_number(bar.total, chart.unit) for bar in chart.bars]
    room = span - 8 * max(map(len, values)) - 16
    labels = [_wrapped(bar.label, room) for bar in chart.bars]
    line, bar_height = 18, 14
    row = 30 + line * max(map(len, labels))
    height = row * len(chart.bars)
    figure.set_size_inches(width / 72, height / 72)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    scale = span / (max(bar.total for bar in chart.bars) or 1.0)
    for number, bar in enumerate(chart.bars):
        top = number * row + row - 48  # of the last line of the label
        for above, text in enumerate(reversed(labels[number])):
            _text(axes, 0, top + 17 - above * line, text, 13.5, _INK)
        _text(axes, span, top + 17, values[number], 13.5, _MUTED, ha="right")
        _box(axes, 0, top + 24, span, bar_height, _TRACK)
        left = 0.0
        plain = _QUIET if bar.label == chart.baseline else _ACCENT
        for part, length in enumerate(bar.parts):
            colour = _PARTS[part % len(_PARTS)] if chart.parts else plain
            _box(axes, left, top + 24, length * scale, bar_height, colour)
            left += length * scale
        factor, word = chart.ratio(bar)
        tone = _LOSS if chart.is_loss(bar) else _ACCENT if word == chart.gain else _MUTED
        _text(axes, width, top + (22 if factor else 35), factor or word, 19 if factor else 12, tone, ha="right")
        if factor:
            _text(axes, width, top + 37, word, 12, _MUTED, ha="right")


def _draw_lines(figure: Any, chart: LineChart, width: int) -> None:
    height = round(max(190, width * 0.4))
    figure.set_size_inches(width / 72, height / 72)
    left, right, bottom, top = 52, 8, 40, 26
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )
    shades = [_QUIET, *_PARTS[1:]]
    for number, line in enumerate(chart.lines):
        last = number == len(chart.lines) - 1
        colour = _ACCENT if last else shades[number % len(shades)]
        style = {"linewidth": 2.4 if last else 1.8, "solid_capstyle": "round", "solid_joinstyle": "round"}
        axes.plot(line.x, line.y, color=colour, marker="o" if len(line.x) == 1 else None, **style)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
    axes.tick_params(length=0, labelsize=12, labelcolor=_MUTED, pad=6)
    axes.locator_params(axis="both", nbins=5)
    axes.xaxis.get_major_locator().set_params(integer=all(x.is_integer() for n in chart.lines for x in n.x))
    figure.text(0, 1 - 14 / height, chart.y_label, fontsize=12, color=_MUTED, parse_math=False)
    figure.text(1 - right / width, 6 / height, chart.x_label, fontsize=12, color=_MUTED, ha="right", parse_math=False)


def _box(axes: Any, left: float, top: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor="none", linewidth=0))


def _text(axes: Any, x: float, y: float, text: str, size: float, colour: str, ha: str = "left") -> None:
    axes.text(x, y, text, fontsize=size, color=colour, ha=ha, va="baseline", parse_math=False)


def _wrapped(label: str, room: float) -> list[str]:
    letters = max(6, int(room / 7.4))  # a generous width of a letter at this size, whatever font the page gets
    return textwrap.wrap(label, letters, max_lines=3, placeholder="…") or [""]


def _for_page(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # the same in every chart, and ids must differ in a page
    # colours stand only inside tags, and texts only outside them: a label of "#030303" stays what it is
    body = re.sub(r"<[^>]*>", lambda tag: _COLOUR.sub(lambda name: _COLOURS[name.group()], tag.group()), body)
    return f'<svg {box.group()} aria-hidden="true" focusable="false">{body.strip()}'
