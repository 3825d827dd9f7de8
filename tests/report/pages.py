"""Documents to show, and what a browser would make of a page."""

from __future__ import annotations

from html.parser import HTMLParser

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
