"""The page: whole, safe with any text, the same each time, and written by rename."""

from __future__ import annotations

import builtins
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from rich.console import Console

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

HOSTILE = "<script>alert(1)</script> & \"q' $x^{2}$ {{ 7 * 7 }} [red]b[/red] ]]> #030303 é 数"
VOID = {"meta", "link", "br", "hr", "img", "input"}


def everything(text: str) -> Document:
    """A document with that text in every place where text can stand."""
    blocks: list[Block] = [
        Text(text),
        Text(text, tone="note"),
        Text(text, tone="warning"),
        Table([text, "n"], [[text, 1.5], [text, text]], caption=text),
        Definitions({text: text}),
        Highlights([Highlight(text, text, text)]),
        BarChart(text, [Bar(text, 2.0), Bar("b", 4.0)], unit=text, baseline=text, gain=text, loss=text),
        BarChart(text, [Bar(text, [1, 2])], parts=[text, text], unit=text),
        LineChart(text, [Line(text, [0, 1], [1, 2]), Line("c", [0], [1])], x_label=text, y_label=text),
    ]
    return Document(text, [Section(text, blocks)], lead=text, opening=blocks[:1], footer=text)


class Page(HTMLParser):
    """What a browser would make of the page: its elements, in order, and whether every one is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_hostile_text_stays_text() -> None:
    tame, hostile = Page(everything("plain").to_html()), Page(everything(HOSTILE).to_html())
    assert not hostile.open
    assert {tag for tag, _ in hostile.tags} == {tag for tag, _ in tame.tags}  # no element that text brought in
    assert "script" not in {tag for tag, _ in hostile.tags}
    assert not [name for _, attributes in hostile.tags for name in attributes if name.startswith("on")]
    assert hostile.named("title") == [{}]
    assert hostile.text.count(HOSTILE) >= 12  # title, heading, lead, footer, paragraphs, cells, terms
    assert any(HOSTILE in (figure["aria-label"] or "") for figure in hostile.named("figure"))


def test_a_label_is_never_taken_for_a_colour() -> None:
    svg = Page(Document("t", [Section("s", [BarChart("c", [Bar("#030303", 1.0)])])]).to_html())
    assert svg.text.count("#030303") == 2  # the wide and the narrow drawing
    assert "#030303" not in str([attributes for tag, attributes in svg.tags if tag != "figure"])


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


def test_written_by_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = everything("first").write_html(tmp_path / "deep" / "report.html")
    before = path.read_text(encoding="utf-8")
    assert before == everything("first").to_html()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        everything("second").write_html(path)
    assert path.read_text(encoding="utf-8") == before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


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


def test_the_terminal_shows_all_text_as_it_is() -> None:
    stream = io.StringIO()
    everything(HOSTILE).print(Console(file=stream, width=400))
    shown = stream.getvalue()
    assert shown.count(HOSTILE) >= 12
    assert "\x1b" not in shown  # not a terminal: no colours


def test_the_terminal_draws_bars_to_scale_and_tells_losses() -> None:
    stream = io.StringIO()
    bars = [Bar("old", 4.0), Bar("new", 8.0)]
    chart = BarChart("Speed", bars, unit="ms", baseline="old")
    Document("t", [Section("s", [chart])]).print(Console(file=stream, width=100))
    old, new = (line for line in stream.getvalue().splitlines() if "ms" in line)
    assert (old.count("█"), new.count("█")) == (14, 28)
    assert new.rstrip().endswith("8.00 ms  2.00× slower")


def test_only_blocks_go_into_a_section() -> None:
    with pytest.raises(TypeError, match=r"str is not a block; wrap text in Text"):
        Section("s", ["text"])  # type: ignore[list-item]


def test_the_callers_lists_may_change_afterwards() -> None:
    row, rows, blocks = ["a", 1.0], [["a", 1.0]], [Text("x")]
    rows[0] = row
    table, section = Table(["n", "v"], rows), Section("s", blocks)
    row[1], blocks[0] = 2.0, Text("y")
    assert table.rows == (("a", 1.0),)
    assert section.blocks == (Text("x"),)
