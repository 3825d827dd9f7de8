"""A document: a title and sections of blocks. It becomes one HTML file, or lines in a terminal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightning_speedkit.report.blocks import Block
from lightning_speedkit.report.html import render_html
from lightning_speedkit.report.terminal import render_terminal

__all__ = ["Document", "Section"]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for block in self.blocks:
            if not isinstance(block, Block):
                raise TypeError(
                    f"Section {self.title!r}: {type(block).__name__} is not a block; wrap text in Text(...)."
                )


@dataclass(frozen=True, slots=True)
class Document:
    """A report of text, tables and charts.

    ``lead`` is the paragraph under the title, ``opening`` holds the blocks before the first section, such as
    :class:`Highlights`, and ``footer`` is the small print.

    >>> from lightning_speedkit.report import Bar, BarChart, Text
    >>> bars = BarChart("Time per step", [Bar("before", 12.0), Bar("after", 4.0)], unit="ms", baseline="before")
    >>> document = Document("Training, before and after", [Section("Speed", [Text("Measured here."), bars])])
    >>> "3.00× faster" in document.to_html()
    True
    """

    title: str
    sections: Sequence[Section]
    lead: str = ""
    opening: Sequence[Block] = ()
    footer: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))
        object.__setattr__(self, "opening", Section("", self.opening).blocks)

    def to_html(self) -> str:
        """The document as one HTML page that refers to nothing outside it. The same document gives the same bytes.

        Raises:
            MissingExtraError: jinja2, or for a chart matplotlib, is not installed.
        """
        return render_html(self)

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path`` by rename, creating its folder: there is never half a page at that path."""
        page, target = self.to_html(), Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            part = Path(folder, target.name)
            part.write_text(page, encoding="utf-8")
            part.replace(target)
        return target

    def print(self, console: Console | None = None) -> None:
        """Show the document in the terminal; colours only where the terminal has them."""
        render_terminal(self, console or Console())
