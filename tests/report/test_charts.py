"""What a chart draws: lengths and places against the numbers, and text that stays text."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from lightning_speedkit.report import (
    Bar,
    BarChart,
    Document,
    Line,
    LineChart,
    Section,
)
from lightning_speedkit.report.charts import draw_chart
from tests.report.pages import Page


def test_a_label_is_never_taken_for_a_colour() -> None:
    svg = Page(Document("t", [Section("s", [BarChart("c", [Bar("#030303", 1.0)])])]).to_html())
    assert svg.text.count("#030303") == 2  # the wide and the narrow drawing
    assert "#030303" not in str([attributes for tag, attributes in svg.tags if tag != "figure"])


def test_bars_are_as_long_as_their_values() -> None:
    page = Document("t", [Section("s", [BarChart("c", [Bar("a", [1, 3]), Bar("b", [2, 0])], parts=["p", "q"])])])
    drawn = page.to_html().split('class="narrow"')[1]
    paths = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+)[^"]*"[^>]*style="fill: var\(--([\w-]+)\)', drawn)
    lengths = [(float(right) - float(left), tone) for left, right, tone in paths if tone != "track"]
    width = 330  # of the narrow drawing: the longest bar, 4, spans it
    expected = [(width / 4, "part-1"), (width * 3 / 4, "part-2"), (width / 2, "part-1"), (0, "part-2")]
    assert [tone for _, tone in lengths] == [tone for _, tone in expected]
    assert [length for length, _ in lengths] == pytest.approx([length for length, _ in expected], abs=0.01)


def test_a_long_label_is_wrapped_before_it_is_cut() -> None:
    def narrow(label: str) -> str:
        chart = BarChart("c", [Bar(label, 1.0)], unit="ms", baseline=label)
        page = Document("t", [Section("s", [chart])]).to_html()
        found = re.search(r'<div class="narrow">(.*?)</div>', page, re.DOTALL)
        assert found is not None
        return Page(found[1]).text

    label = "Image files, DataLoader as people write it"
    assert all(word in narrow(label) for word in label.split())
    assert "…" not in narrow(label)
    assert "…" in narrow("word " * 40)


_BARS = BarChart("c", [Bar("old", 4.0), Bar("new", 8.0), Bar("odd", 1.0)], unit="ms", baseline="old")
_LINES = LineChart("c", [Line("a", [0, 1, 4], [1.0, 3.0, 2.0]), Line("b", [2], [3.0])], x_label="epoch", y_label="loss")


def _curves(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line that is drawn: those with a width that only lines have."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="[^"]*stroke-width: (?:1\.8|2\.4)', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)] for path in paths]


@pytest.mark.parametrize("width", [330, 680])
@pytest.mark.parametrize("chart", [_BARS, _LINES])
def test_a_chart_is_sound_svg_of_the_width_asked_for(chart: BarChart | LineChart, width: int) -> None:
    root = ElementTree.fromstring(draw_chart(chart, width).replace("xlink:", ""))
    assert root.tag == "svg"
    left, top, right, bottom = map(float, root.attrib["viewBox"].split())
    assert (left, top, right) == (0, 0, width)
    assert bottom > 0
    assert root.attrib["aria-hidden"] == "true"


@pytest.mark.parametrize("chart", [_BARS, _LINES])
def test_every_colour_is_the_pages(chart: BarChart | LineChart) -> None:
    """So that a chart follows the light or dark theme."""
    svg = draw_chart(chart, 680)
    values = re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)
    assert values
    assert {value for value in values if not value.startswith("var(--")} <= {"none"}


def test_lines_are_drawn_to_scale() -> None:
    lines = [Line("a", [0, 1, 4], [1.0, 3.0, 2.0]), Line("b", [0, 4], [2.0, 1.0])]
    first, second = _curves(draw_chart(LineChart("c", lines), 680))
    (x0, low), (x1, high), (x4, middle) = first
    assert (x1 - x0) / (x4 - x0) == pytest.approx(1 / 4, abs=1e-4)
    assert high < middle < low  # in SVG, up is less
    assert (low - middle) / (low - high) == pytest.approx(1 / 2, abs=1e-4)
    assert second == [pytest.approx((x0, middle)), pytest.approx((x4, low))]  # on the same axes


def test_a_line_of_one_point_is_a_mark() -> None:
    alone = draw_chart(LineChart("c", [Line("a", [1], [2.0])]), 680)
    assert re.search(r"<use[^>]*var\(--accent\)", alone)
    assert not re.search(r"<use[^>]*var\(--accent\)", draw_chart(LineChart("c", [Line("a", [1, 2], [2.0, 3.0])]), 680))


@pytest.mark.parametrize(("x", "whole"), [([1, 2, 3], True), ([0.1, 0.2, 0.3], False)])
def test_an_axis_of_epochs_has_whole_numbers(x: list[float], whole: bool) -> None:
    chart = LineChart("c", [Line("a", x, [1000.5, 1001.0, 1002.5])], x_label="x", y_label="y")
    ticks = [t for t in Page(draw_chart(chart, 680)).text.split() if re.fullmatch(r"[\d.]+", t) and float(t) < 1000]
    assert ticks
    assert all(tick.isdigit() for tick in ticks) is whole


def test_the_labels_of_the_axes_are_there() -> None:
    text = Page(draw_chart(_LINES, 680)).text
    assert "epoch" in text
    assert "loss" in text


def test_the_words_and_colours_of_a_gain_and_a_loss() -> None:
    svg = draw_chart(_BARS, 680)
    told = {
        text: re.findall(r"fill: var\(--(\w+)\)", style)
        for style, text in re.findall(r'<text style="([^"]*)"[^>]*>([^<]*)</text>', svg)
    }
    assert told["2.00×"] == ["loss"]  # 8 against 4, and less is better
    assert told["4.00×"] == ["accent"]
    assert {"slower", "faster", "baseline", "4.00 ms", "8.00 ms", "1.00 ms"} <= told.keys()
    bars = [tone for tone in re.findall(r"<path[^>]*fill: var\(--([\w-]+)\)", svg) if tone != "track"]
    assert bars == ["quiet", "accent", "accent"]  # the baseline stands back


def test_bars_of_nothing_are_drawn() -> None:
    svg = draw_chart(BarChart("c", [Bar("a", 0.0), Bar("b", 0)], baseline="a"), 330)
    assert re.findall(r"<text[^>]*>([^<]*)</text>", svg) == ["a", "0", "baseline", "b", "0", "–"]


def test_a_chart_of_a_longer_label_has_higher_rows() -> None:
    def height(label: str) -> float:
        box = re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', draw_chart(BarChart("c", [Bar(label, 1.0)]), 330))
        assert box is not None
        return float(box[1])

    one, two, three, many = (height("a label of many words " * count) for count in (1, 3, 4, 40))
    assert one < two < three == many  # three lines at most


def test_two_charts_of_a_page_share_no_id() -> None:
    other = LineChart("d", _LINES.lines)
    drawn = [draw_chart(chart, width) for chart in (_LINES, other) for width in (330, 680)]
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in drawn]
    assert all(ids)
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_drawing_leaves_no_trace() -> None:
    before = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw_chart(BarChart("c", [Bar("数 \N{SNOWMAN}", 1.0)]), 330).count("数") == 1  # not in matplotlib's font
    assert dict(matplotlib.rcParams) == before
