"""Documents of text, tables and charts, as one self-contained HTML file or in the terminal."""

from lightning_speedkit.report.blocks import (
    Bar,
    BarChart,
    Block,
    Definitions,
    Highlight,
    Highlights,
    Line,
    LineChart,
    Table,
    Text,
)
from lightning_speedkit.report.document import Document, Section
from lightning_speedkit.report.numbers import format_number, ratio_text

__all__ = [
    "Bar",
    "BarChart",
    "Block",
    "Definitions",
    "Document",
    "Highlight",
    "Highlights",
    "Line",
    "LineChart",
    "Section",
    "Table",
    "Text",
    "format_number",
    "ratio_text",
]
