from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_speedkit.architecture.backbone_report import backbone_document, draw_front
from lightning_speedkit.architecture.backbone_table import Backbone, BackboneTable
from lightning_speedkit.errors import MissingExtraError


def table() -> BackboneTable:
    values = {"a$_1$": (1.0, 9.0), "b<i>": (2.0, 5.0), "c": (3.0, 7.0)}
    rows = [
        Backbone(name=name, task_shape=(3, 8, 8), num_classes=10, latency_ms=x, training_memory_mib=y)
        for name, (x, y) in values.items()
    ]
    failed = Backbone(name="d", task_shape=(3, 8, 8), num_classes=10, error="boom")
    return BackboneTable(rows=(*rows, failed), budget={"max_latency_ms": 8.0}, device_name="a CPU", rounds=3)


def test_the_picture_has_all_that_were_measured_and_marks_the_front() -> None:
    picture = draw_front(table())
    told = re.findall(r"<text[^>]*style=\"([^\"]*)\"[^>]*>(\d  [^<]*)</text>", picture)
    assert [(text, bool(re.search("bold|700", style))) for style, text in told] == [
        ("1  a$_1$", True),
        ("2  b&lt;i&gt;", True),
        ("3  c", False),
    ]
    assert "latency of one image, ms" in picture
    assert "peak memory of training, MiB" in picture
    assert picture == draw_front(table()) == table().to_svg()


def test_the_report_has_table_bars_and_front(tmp_path: Path) -> None:
    document = backbone_document(table())
    assert [section.title for section in document.sections] == [
        "Candidates",
        "Latency of one image",
        "Pareto front",
        "How it was measured",
    ]
    page = table().document().write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "b&lt;i&gt;" in page
    assert "boom" in page
    assert "Costs say nothing of accuracy" in page


def test_nothing_to_draw() -> None:
    row = Backbone(name="a", task_shape=(3, 8, 8), num_classes=10, latency_ms=1.0)
    with pytest.raises(ValueError, match="No candidate has latency of one image, ms and peak memory of training, MiB"):
        BackboneTable(rows=(row,)).to_svg()
    assert len(BackboneTable(rows=(row,)).document().sections) == 3


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-speedkit\[report\]'"):
        table().to_svg()
