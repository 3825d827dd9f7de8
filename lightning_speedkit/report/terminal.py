"""A document in the terminal, by rich. Text is never read as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Styled

from lightning_speedkit.report.blocks import (
    BarChart,
    Block,
    Definitions,
    Highlights,
    LineChart,
    Table,
    Text,
)
from lightning_speedkit.report.numbers import format_number

if TYPE_CHECKING:
    from lightning_speedkit.report.document import Document

__all__ = ["render_block", "render_terminal"]

_PART_STYLES = ("cyan", "yellow", "bright_black", "magenta")
_PART_SIGNS = ("█", "▓", "▒", "░")
_STEPS = "▁▂▃▄▅▆▇█"
_LONGEST_LINE = 40  # of more points, so many are shown, the first and the last among them


def render_terminal(document: Document, console: Console) -> None:
    """Print the whole document."""
    console.print()
    console.print(Styled(document.title, style="bold"))
    if document.lead:
        console.print(Styled(document.lead))
    for block in document.opening:
        console.print(Padding(render_block(block), (1, 0, 0, 0)))
    for section in document.sections:
        console.print(Padding(Styled(section.title, style="bold cyan"), (1, 0, 0, 0)))
        for number, block in enumerate(section.blocks):
            console.print(Padding(render_block(block), (1 if number else 0, 0, 0, 0)))
    if document.footer:
        console.print(Padding(Styled(document.footer, style="dim"), (1, 0, 0, 0)))


def render_block(block: Block) -> RenderableType:
    """One block as something that rich prints."""
    if isinstance(block, Text):
        mark, style = {"plain": ("", ""), "note": ("Note: ", "dim"), "warning": ("Beware: ", "yellow")}[block.tone]
        return Styled(mark + block.text, style=style)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Definitions):
        return _pairs([(term, value) for term, value in block.items], "dim")
    if isinstance(block, Highlights):
        return _pairs([(h.value, f"{h.label}  {h.detail}".rstrip()) for h in block.items], "bold cyan")
    if isinstance(block, BarChart):
        return _bars(block)
    return _lines(block)


def _table(block: Table) -> RenderableType:
    grid = Grid(box=box.SIMPLE_HEAD, title=Styled(block.caption) if block.caption else None, title_justify="left")
    for column, name in enumerate(block.header):
        grid.add_column(Styled(name), justify="right" if block.is_numeric(column) else "left")
    for row in block.cells():
        grid.add_row(*(Styled(cell) for cell in row))
    return grid


def _pairs(pairs: list[tuple[str, str]], style: str) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    for first, second in pairs:
        grid.add_row(Styled(first, style=style), Styled(second))
    return grid


def _bars(block: BarChart) -> RenderableType:
    width, longest = 28, max(bar.total for bar in block.bars) or 1.0
    grid = Grid.grid(padding=(0, 2))
    grid.add_column()
    for _ in range(3):
        grid.add_column(no_wrap=True)
    for bar in block.bars:
        drawn, done, filled = Styled(), 0.0, 0
        for part, value in enumerate(bar.parts):
            done += value
            cells = round(done / longest * width) - filled
            filled += cells
            drawn.append(_PART_SIGNS[part % 4] * cells, style=_PART_STYLES[part % 4])
        ratio = " ".join(filter(None, block.ratio(bar)))
        style = "red" if block.is_loss(bar) else "bold cyan" if block.ratio(bar)[0] else "dim"
        value_text = Styled(format_number(bar.total, block.unit), justify="right")
        grid.add_row(Styled(bar.label), drawn, value_text, Styled(ratio, style=style))
    legend = Styled()
    for part, name in enumerate(block.parts):
        legend.append(f"{_PART_SIGNS[part % 4]} ", style=_PART_STYLES[part % 4]).append(f"{name}   ")
    title = Styled(block.title, style="italic")
    return Group(title, grid, legend) if block.parts else Group(title, grid)


def _lines(block: LineChart) -> RenderableType:
    low = min(min(line.y) for line in block.lines)
    spread = max(max(line.y) for line in block.lines) - low or 1.0
    grid = Grid.grid(padding=(0, 2))
    for line in block.lines:
        shown = min(len(line.y), _LONGEST_LINE)
        points = (line.y[round(number * (len(line.y) - 1) / max(1, shown - 1))] for number in range(shown))
        drawn = "".join(_STEPS[round((y - low) / spread * (len(_STEPS) - 1))] for y in points)
        ends = f"{format_number(line.y[0])} → {format_number(line.y[-1])}"
        grid.add_row(Styled(line.label), Styled(drawn, style="cyan"), Styled(ends))
    return Group(Styled(block.title, style="italic"), grid)
