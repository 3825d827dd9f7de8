"""The HTML page of a document. Text goes through jinja2's autoescape; only our own charts are inserted as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.report.blocks import BarChart, Block, LineChart
from lightning_speedkit.report.charts import draw_chart

if TYPE_CHECKING:
    from lightning_speedkit.report.document import Document

__all__ = ["render_html"]

_WIDE, _NARROW = 680, 330  # the widths that charts are drawn for, in CSS pixels; the page shows the one that fits


def render_html(document: Document) -> str:
    """The page as a text, without anything that the browser would have to load."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("an HTML report", extra="report", library="jinja2") from error
    environment = Environment(
        loader=PackageLoader("lightning_speedkit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["kind"] = _kind
    environment.globals["charts"] = _charts
    return environment.get_template("page.html").render(document=document)


def _kind(block: Block) -> str:
    return type(block).__name__


def _charts(block: BarChart | LineChart) -> dict[str, Any]:
    from markupsafe import Markup  # comes with jinja2

    drawn = {name: draw_chart(block, width) for name, width in (("wide", _WIDE), ("narrow", _NARROW))}
    return {name: Markup(svg) for name, svg in drawn.items()}  # matplotlib has escaped the texts in it
