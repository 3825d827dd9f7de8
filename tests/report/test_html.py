"""The page: whole, safe with any text, readable without seeing, and the same each time."""

from __future__ import annotations

import builtins
import re
from typing import Any

import matplotlib
import pytest
from jinja2 import UndefinedError

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.report import (
    Bar,
    BarChart,
    Block,
    Definitions,
    Document,
    Highlight,
    Highlights,
    Line,
    LineChart,
    Section,
    Table,
    Text,
)
from lightning_speedkit.report.html import render_html
from tests.report.pages import HOSTILE, Page, everything


def test_hostile_text_stays_text() -> None:
    tame, hostile = Page(everything("plain").to_html()), Page(everything(HOSTILE).to_html())
    assert not hostile.open
    assert {tag for tag, _ in hostile.tags} == {tag for tag, _ in tame.tags}  # no element that text brought in
    assert "script" not in {tag for tag, _ in hostile.tags}
    assert not [name for _, attributes in hostile.tags for name in attributes if name.startswith("on")]
    assert hostile.named("title") == [{}]
    assert hostile.text.count(HOSTILE) >= 12  # title, heading, lead, footer, paragraphs, cells, terms
    assert any(HOSTILE in (figure["aria-label"] or "") for figure in hostile.named("figure"))


def test_nothing_is_loaded_from_outside() -> None:
    page = everything("plain").to_html()
    parsed = Page(page)
    assert not {"link", "script", "img", "iframe", "object", "image"} & {tag for tag, _ in parsed.tags}
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            if name in ("href", "src", "xlink:href", "srcset", "data"):
                assert (value or "").startswith("#"), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", page)
    policy = [meta["content"] for meta in parsed.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_ids_differ() -> None:
    ids = [attributes["id"] for _, attributes in Page(everything("plain").to_html()).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_readable_without_seeing_the_charts() -> None:
    chart = BarChart("Speed", [Bar("old", 4.0), Bar("new", 8.0), Bar("odd", 2.0)], unit="ms", baseline="old")
    parsed = Page(Document("t", [Section("s", [chart, Table(["a", "b"], [["x", 1]], caption="c")])]).to_html())
    (figure,) = parsed.named("figure")
    assert figure["role"] == "img"
    told = "Speed. old: 4.00 ms, the baseline; new: 8.00 ms, 2.00× slower; odd: 2.00 ms, 2.00× faster."
    assert figure["aria-label"] == told
    assert all(svg["aria-hidden"] == "true" for svg in parsed.named("svg"))
    assert [cell.get("scope") for cell in parsed.named("th")] == ["col", "col", "row"]
    assert parsed.named("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in parsed.named("meta"))


def test_the_same_document_gives_the_same_bytes_whatever_matplotlib_is_set_to() -> None:
    first = everything(HOSTILE).to_html()
    with matplotlib.rc_context({"font.size": 40, "svg.fonttype": "path", "axes.grid": True, "axes.labelcolor": "red"}):
        chosen = dict(matplotlib.rcParams)
        assert everything(HOSTILE).to_html() == first
        assert dict(matplotlib.rcParams) == chosen


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"{library}.*lightning-speedkit\[report\]"):
        everything("plain").to_html()


def _body(block: Block) -> str:
    return render_html(Document("t", [Section("s", [block])])).partition("<h2>s</h2>")[2].partition("</section>")[0]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Text("a < b"), '<p class="plain">a &lt; b</p>'),
        (Text("a", tone="note"), '<p class="note">a</p>'),
        (Text("a", tone="warning"), '<p class="warning">a</p>'),
        (Definitions([("GPU", "none"), ("torch", "2")]), "<dt>GPU</dt><dd>none</dd><dt>torch</dt><dd>2</dd>"),
        (Highlights([Highlight("2×", "faster")]), '<dt>faster</dt><dd class="value">2×</dd></div>'),
        (
            Highlights([Highlight("2×", "faster", "than before")]),
            '<dd class="value">2×</dd><dd class="detail">than before</dd></div>',
        ),
        (Table(["a", "b"], [["x", 1.5]], caption="c"), "<caption>c</caption>"),
        (Table(["a", "b"], [["x", 1.5]]), 'aria-label="Table"'),
        (Table(["a", "b"], [["x", 1.5]]), '<th scope="col">a</th><th scope="col" class="number">b</th>'),
        (Table(["a", "b"], [["x", 1.5]]), '<th scope="row">x</th><td class="number">1.50</td>'),
        (Table(["a", "b"], [["x", "y"]]), '<th scope="row">x</th><td>y</td>'),
    ],
    ids=repr,
)
def test_each_block_is_the_element_that_it_is(block: Block, expected: str) -> None:
    assert expected in re.sub(r">\s+<", "><", _body(block))


def test_the_parts_of_a_page_stand_in_their_order() -> None:
    document = Document("Title", [Section("One", [Text("1")]), Section("Two", [Text("2")])], "Lead", [Text("0")], "End")
    text = Page(render_html(document)).text
    words = ["Title", "Lead", "0", "One", "1", "Two", "2", "End"]
    assert [line for line in map(str.strip, text.splitlines()) if line][-len(words) :] == words


def test_what_a_document_does_not_have_leaves_nothing_empty() -> None:
    tags = {tag for tag, _ in Page(render_html(Document("t", []))).tags}
    assert not {"footer", "section", "p", "figure"} & tags


def test_the_swatches_of_a_legend_have_the_colours_that_are_drawn() -> None:
    """Each line is drawn in a colour, and the legend's class is given one by the style sheet."""
    lines = [Line(f"line {number}", [0, 1], [number, number + 1]) for number in range(6)]
    page = render_html(Document("t", [Section("s", [LineChart("c", lines)])]))
    rules = re.findall(r"([^{}]*)\{ background: var\(--([\w-]+)\); \}", page)
    colours = {name.strip().lstrip("."): colour for names, colour in rules for name in names.split(",")}
    shown = [colours[name] for name in re.findall(r'<li><i class="([\w-]+)"', page)]
    wide = page.partition('class="wide"')[2].partition('class="narrow"')[0]
    drawn = re.findall(r"stroke: var\(--([\w-]+)\); stroke-width: (?:1\.8|2\.4)", wide)
    assert len(drawn) == 6
    assert shown == drawn
    assert drawn[-1] == "accent"

    bars = [Bar("a", [1.0] * 5)]
    page = render_html(Document("t", [Section("s", [BarChart("c", bars, parts=list("vwxyz"))])]))
    shown = [colours[name] for name in re.findall(r'<li><i class="([\w-]+)"', page)]
    wide = page.partition('class="wide"')[2].partition('class="narrow"')[0]
    assert re.findall(r"fill: var\(--(part-\d)\)", wide) == shown == ["part-1", "part-2", "part-3", "part-4", "part-1"]


def test_one_line_needs_no_legend() -> None:
    assert "<li>" not in _body(LineChart("c", [Line("only", [0, 1], [1, 2])]))


def test_a_slip_in_the_template_is_no_silent_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        title, lead, opening, sections = "t", "", (), ()  # and no footer

    with pytest.raises(UndefinedError, match="footer"):
        render_html(Odd())  # type: ignore[arg-type]
