"""What a document is made of: text, tables, lists of terms, headline numbers and charts. Plain data, checked when made.

Sequences are kept as tuples, so a block does not change after it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_speedkit.report.numbers import format_number, ratio_text

__all__ = [
    "Bar",
    "BarChart",
    "Block",
    "Definitions",
    "Highlight",
    "Highlights",
    "Line",
    "LineChart",
    "Table",
    "Text",
]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. ``tone="note"`` sets it apart as a remark, ``tone="warning"`` as something to beware of."""

    text: str
    tone: Literal["plain", "note", "warning"] = "plain"

    def __post_init__(self) -> None:
        if self.tone not in ("plain", "note", "warning"):
            raise ValueError(f"Text(tone={self.tone!r}): use plain, note or warning.")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header. The first column heads its row; a column that holds only numbers is set to the right.

    >>> table = Table(["run", "ms"], [["plain", 12.5], ["packed", 4]], caption="Time per step")
    >>> table.cells()
    (('plain', '12.5'), ('packed', '4'))
    >>> table.is_numeric(1)
    True
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", tuple(self.header))
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        for number, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ValueError(f"Table: row {number} has {len(row)} cells, the header has {len(self.header)}.")

    def cells(self) -> tuple[tuple[str, ...], ...]:
        """Every cell as text."""
        return tuple(tuple(c if isinstance(c, str) else format_number(c) for c in row) for row in self.rows)

    def is_numeric(self, column: int) -> bool:
        """Whether the column is numbers: as such, or as texts that begin with a digit."""
        texts = [row[column].lstrip("+-−<≈~ ") for row in self.cells()]
        return column > 0 and bool(texts) and all(t[:1].isdigit() or t in ("", "–", "-", "n/a") for t in texts)


@dataclass(frozen=True, slots=True)
class Definitions:
    """Terms and what they are, such as the hardware and versions of a run."""

    items: Sequence[tuple[str, str]]

    def __post_init__(self) -> None:
        items = self.items.items() if isinstance(self.items, Mapping) else self.items
        object.__setattr__(self, "items", tuple((str(term), str(value)) for term, value in items))


@dataclass(frozen=True, slots=True)
class Highlight:
    """One number to remember: ``Highlight("2.1×", "samples per second", "1 240 instead of 590")``."""

    value: str
    label: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Highlights:
    """A row of headline numbers; two to four read well."""

    items: Sequence[Highlight]

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a value, or a value for each part of the chart."""

    label: str
    values: float | Sequence[float]

    def __post_init__(self) -> None:
        values = (self.values,) if isinstance(self.values, (int, float)) else tuple(self.values)
        object.__setattr__(self, "values", tuple(float(value) for value in values))
        for value in self.parts:
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"Bar({self.label!r}): {value} cannot be drawn; a bar is a finite number, 0 or more.")

    @property
    def parts(self) -> tuple[float, ...]:
        """The values as a tuple."""
        return self.values if isinstance(self.values, tuple) else ()

    @property
    def total(self) -> float:
        """All parts together."""
        return math.fsum(self.parts)


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars to compare, each with its value, and with its ratio to ``baseline`` if one is named.

    ``parts`` names the parts of stacked bars. ``better`` says which way a gain goes; ``gain`` and ``loss`` are the
    words for it. A result worse than the baseline is labelled as a loss.

    >>> chart = BarChart("Time per step", [Bar("plain", 12.0), Bar("packed", 4.0)], unit="ms", baseline="plain")
    >>> chart.ratio(chart.bars[1])
    ('3.00×', 'faster')
    >>> print(chart.describe())
    Time per step. plain: 12.0 ms, the baseline; packed: 4.00 ms, 3.00× faster.
    """

    title: str
    bars: Sequence[Bar]
    unit: str = ""
    parts: Sequence[str] = ()
    baseline: str | None = None
    better: Literal["lower", "higher"] = "lower"
    gain: str = "faster"
    loss: str = "slower"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bars", tuple(self.bars))
        object.__setattr__(self, "parts", tuple(self.parts))
        count = max(1, len(self.parts))
        for bar in self.bars:
            if len(bar.parts) != count:
                raise ValueError(f"BarChart: bar {bar.label!r} has {len(bar.parts)} values; parts asks for {count}.")
        labels = [bar.label for bar in self.bars]
        if not labels:
            raise ValueError("BarChart: there are no bars to draw.")
        if self.baseline is not None and self.baseline not in labels:
            raise ValueError(f"BarChart(baseline={self.baseline!r}) is not the label of a bar; use one of {labels}.")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"BarChart(better={self.better!r}): use lower or higher.")

    def ratio(self, bar: Bar) -> tuple[str, str]:
        """The bar against the baseline as a factor and a word, or two empty texts."""
        if self.baseline is None:
            return "", ""
        if bar.label == self.baseline:
            return "", "baseline"
        base = next(b for b in self.bars if b.label == self.baseline).total
        above, below = (base, bar.total) if self.better == "lower" else (bar.total, base)
        return ratio_text(above / below, self.gain, self.loss) if below else ("–", "")

    def is_loss(self, bar: Bar) -> bool:
        """Whether the bar is worse than the baseline."""
        return self.ratio(bar)[1] == self.loss

    def describe(self) -> str:
        """The whole chart in words, for those who do not see it."""
        told = []
        for bar in self.bars:
            text = f"{bar.label}: {format_number(bar.total, self.unit)}"
            if self.parts:
                text += " ({})".format(
                    ", ".join(f"{name} {format_number(v)}" for name, v in zip(self.parts, bar.parts, strict=True))
                )
            factor, word = self.ratio(bar)
            told.append(text + (f", {factor} {word}" if factor else ", the baseline" if word else ""))
        return f"{self.title}. {'; '.join(told)}."


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its points from left to right."""

    label: str
    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", tuple(float(value) for value in self.x))
        object.__setattr__(self, "y", tuple(float(value) for value in self.y))
        if len(self.x) != len(self.y) or not self.x:
            raise ValueError(f"Line({self.label!r}) has {len(self.x)} x and {len(self.y)} y; give as many, at least 1.")
        if not all(map(math.isfinite, (*self.x, *self.y))):
            raise ValueError(f"Line({self.label!r}) has a value that is not finite; leave that point out.")


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common axis. The last one is the one to look at: it has the accent colour.

    >>> chart = LineChart("Loss", [Line("plain", [0, 1], [2.3, 0.4])], x_label="epoch", y_label="loss")
    >>> print(chart.describe())
    Loss: loss over epoch. plain: from 2.30 to 0.400.
    """

    title: str
    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.lines))
        if not self.lines:
            raise ValueError("LineChart: there are no lines to draw.")

    def describe(self) -> str:
        """The whole chart in words, for those who do not see it."""
        axes = f": {self.y_label} over {self.x_label}" if self.x_label and self.y_label else ""
        told = (f"{n.label}: from {format_number(n.y[0])} to {format_number(n.y[-1])}" for n in self.lines)
        return f"{self.title}{axes}. {'; '.join(told)}."


Block = Text | Table | Definitions | Highlights | BarChart | LineChart
