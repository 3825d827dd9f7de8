"""What the page of a quantization shows, block by block and as HTML."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit.compress import QuantizationReport
from lightning_speedkit.compress.report import CandidateReport
from lightning_speedkit.compress.report_page import report_document
from lightning_speedkit.report import BarChart, Document, Highlights, Table, Text


def _report(**changes: Any) -> QuantizationReport:
    values: dict[str, Any] = {
        "kept": True,
        "reason": "It holds.",
        "backend": "torch-ao-static",
        "scheme": "static-int8",
        "layers_quantized": ("a", "b"),
        "layers_total": 3,
        "bytes_before": 4_000_000,
        "bytes_after": 1_010_000,
        "batch_size": 64,
        "seconds_before_batch": 0.002,
        "seconds_after_batch": 0.001,
        "metric": "val_acc",
        "metric_before": 0.97,
        "metric_after": 0.96875,
    }
    return QuantizationReport(**{**values, **changes})


def _candidate(**changes: Any) -> CandidateReport:
    return CandidateReport(**{"backend": "one", "scheme": "static-int8", "outcome": "kept", **changes})


def _section(document: Document, title: str) -> Any:
    (block,) = next(section.blocks for section in document.sections if section.title == title)
    return block


def test_a_loss_is_told_as_one() -> None:
    document = report_document(_report(seconds_after_batch=0.005, bytes_after=5_000_000))
    (opening,) = document.opening
    assert isinstance(opening, Highlights)
    assert [(item.value, item.label) for item in opening.items] == [
        ("2.50\u00d7", "slower"),
        ("1.25\u00d7", "larger"),
        ("0.969", "val_acc"),
    ]


def test_charts_hold_float_and_what_was_measured_of_each_candidate() -> None:
    candidates = (_candidate(seconds_batch=0.001, bytes=10**6), _candidate(backend="two", float_layers=("c",)))
    document = report_document(_report(candidates=candidates))
    speed, size = _section(document, "Speed"), _section(document, "Size")
    assert isinstance(speed, BarChart)
    assert [(bar.label, bar.total) for bar in speed.bars] == [("float32", 2.0), ("one", 1.0)]
    assert [(bar.label, bar.total) for bar in size.bars] == [("float32", 4.0), ("one", 1.0)]
    assert (speed.unit, size.unit, speed.baseline) == ("ms", "MB", "float32")


def test_tables_hold_each_candidate_and_each_layer() -> None:
    candidates = (
        _candidate(metric=0.96, metric_drop=0.01, relative_error=0.02, float_layers=("c",)),
        _candidate(backend="two", outcome="failed", reason="no"),
        _candidate(backend="three", metric=0.9725, metric_drop=-0.0025),
    )
    document = report_document(_report(candidates=candidates, skipped={"c": "why"}, sensitivity={"c": 0.25}))
    quality, tried, layers = (_section(document, title) for title in ("Quality", "What was tried", "Layers"))
    assert isinstance(quality, Table)
    assert quality.cells() == (
        ("float32", "0.970", "", ""),
        ("one, 1 more in float", "0.960", "0.01", "0.02"),
        ("three", "0.973", "-0.0025 (a gain)", ""),
    )
    assert tried.cells() == (
        ("one, 1 more in float", "static-int8", "kept", ""),
        ("two", "static-int8", "failed", "no"),
        ("three", "static-int8", "kept", ""),
    )
    assert layers.cells() == (("a", "static-int8", ""), ("b", "static-int8", ""), ("c", "float: why", "0.25"))


def test_what_was_not_measured_has_no_section() -> None:
    document = report_document(QuantizationReport(kept=False, reason="nothing", notes=("a note",)))
    assert [section.title for section in document.sections] == ["Quality"]
    assert list(document.opening) == [Text("a note", tone="warning")]
    assert "unknown threads" in document.footer


def test_the_page_tells_the_verdict_every_candidate_and_every_layer() -> None:
    pytest.importorskip("matplotlib")
    candidates = (
        CandidateReport(
            backend="torch-ao-static",
            scheme="static-int8",
            outcome="kept",
            bytes=10**6,
            seconds_batch=0.001,
            seconds_one=1e-4,
            metric=0.96875,
            metric_drop=0.00125,
            relative_error=0.01,
            float_layers=("c",),
        ),
        CandidateReport(backend="broken<b>", scheme="fp8", outcome="saturation", reason="saturation: off by half"),
    )
    report = _report(
        candidates=candidates,
        skipped={"c": "left in float"},
        sensitivity={"a": 0.001, "c": 0.25},
        notes=("It is not smaller: 1 -> 2 bytes.",),
        seconds_before_one=2e-4,
        validation_batches=6,
    )
    page = report_document(report).to_html()
    texts = ["2.00\u00d7", "3.96\u00d7", "torch-ao-static, 1 more in float", "saturation: off by half", "left in float"]
    assert [text for text in texts if text not in page] == []
    assert "broken&lt;b&gt;" in page
    assert "It is not smaller: 1 -&gt; 2 bytes." in page
    assert report_document(QuantizationReport(kept=False, reason="nothing")).to_html().count("<svg") == 0
